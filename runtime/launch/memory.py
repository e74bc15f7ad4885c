"""A folder in the memory of this host that outlives the ranks of a launch, for the state that they keep."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autopart.runtime.watch.processes import state_of

MEMORY = Path("/dev/shm")
_PREFIX = "autopart-launch"


@contextmanager
def folder_in_memory() -> Iterator[str]:
    """Yield a new folder that only this user can open, and delete it at the end; "" where the system has none."""
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)):
        yield ""
        return
    _sweep()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{os.getpid()}-", dir=MEMORY, ignore_cleanup_errors=True) as own:
        yield own


def _sweep() -> None:
    """Delete what launchers of this user left that were killed."""
    for left in MEMORY.glob(f"{_PREFIX}-*"):
        found = re.match(rf"{_PREFIX}-(\d+)-", left.name)
        with suppress(OSError):
            if found and left.lstat().st_uid == os.getuid() and state_of(int(found[1])) == "gone":
                shutil.rmtree(left, ignore_errors=True)
