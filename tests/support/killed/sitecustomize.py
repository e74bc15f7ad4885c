"""Lets a script under a launcher lose one rank: Python imports this first if its folder is in PYTHONPATH.

KILLED_RANK and KILLED_STEP say which rank kills itself at the start of which call of `Pipe.step`, before any restart;
with KILLED_LAUNCHER it kills the launcher first.
"""

from __future__ import annotations

import os
import signal
from typing import Any


def _install() -> None:
    from autopart.pipe.pipe import Pipe

    left, step = int(os.environ["KILLED_STEP"]), Pipe.step

    def counted(self: Pipe, *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            if os.environ.get("KILLED_LAUNCHER"):
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **options)

    Pipe.step = counted  # type: ignore[method-assign]


if os.environ.get("RANK", "") == os.environ.get("KILLED_RANK") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    _install()
