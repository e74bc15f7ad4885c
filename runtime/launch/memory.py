"""A folder in the memory of this host that outlives the ranks of a launch, for the state that they keep."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "autopart-memory-"


@contextmanager
def folder_in_memory() -> Iterator[str]:
    """Yield a new folder that only this user can open, and delete it at the end; "" where the system has none.

    It is locked until then.  That tells other launchers that this one lives: its process id would not, in a container
    that has the same memory and other ids."""
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)):
        yield ""
        return
    _sweep()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=MEMORY))
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = made.rename(made.with_name(made.name[1:]))  # no other launcher looks at it before it is locked
        yield str(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _sweep() -> None:
    """Delete what launchers of this user left that were killed."""
    for left in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            held = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)
