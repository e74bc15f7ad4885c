"""End this rank when its launcher ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import cache
from typing import NoReturn

LOOK_S = 0.5
STOPPED_S = 5.0
"""Seconds for which the system has to report a rank as stopped by a signal before it is named."""


@cache
def watch_launcher() -> None:
    """End this process when torchrun ends.

    Does nothing for workers of `autopart.launch`, which end with their parent, and for ranks started by hand, which may
    outlive their shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and "AUTOPART_PARENT" not in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="autopart-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    end_process(f"rank {os.environ.get('RANK')} ends: its launcher, process {launcher}, is gone")


def end_process(why: str) -> NoReturn:
    """Print the reason and end the process at once, even while the main thread is blocked."""
    print(f"autopart: {why}", file=sys.stderr, flush=True)
    os._exit(1)
