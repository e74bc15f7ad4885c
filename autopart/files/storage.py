"""The folder of caches on disk, atomic writes, and a lock between processes."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopart.files.limits import LOCK_SECONDS


def cache_folder() -> Path:
    """Return the folder of files kept between runs: $AUTOPART_CACHE, else autopart/ in the user's cache folder."""
    own = os.environ.get("AUTOPART_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autopart"


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a UTF-8 file atomically: readers see the old content or the new one, and a failure leaves the old one.

    mode: of the file, less the umask.  Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a file; the others wait.

    The lock is on `<name>.lock` beside the file, because `write_whole` replaces the file itself; the lock file stays.
    A process that ends releases its lock.  Raises OSError, also if the lock file is not a regular file, or the lock is
    not free after `LOCK_SECONDS`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name}.lock is not a regular file")
        deadline = time.monotonic() + LOCK_SECONDS
        while True:  # flock has no timeout
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)
