"""Where caches lie on disk, and how a file is written: whole or not at all, by one process at a time."""

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
    """The folder of what is kept between runs: $AUTOPART_CACHE, else autopart/ in the user's cache folder."""
    own = os.environ.get("AUTOPART_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autopart"


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a UTF-8 file so that readers see the old content or the new one, never a part of it.

    The text goes to a file of its own beside the target and takes its place once it is on disk.  When anything fails,
    that file is removed and the target stays as it was.  mode: of the file, less the umask.  Raises
    OSError.
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
    """Only one process at a time is inside for this path; the others wait.

    For reading a file, changing what it says and writing it back.  The lock is held on `<name>.lock` beside the file,
    because `write_whole` puts another file in the place of the first.  It ends with the process that holds it, however
    that ends, and the lock file stays.  The folder has to exist.  Raises OSError, also when the lock is a link, a pipe
    or the like, or is not free after `LOCK_SECONDS`: whoever holds it may have been stopped.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name}.lock is not a regular file")
        _take(descriptor)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """Lock an open file; the system has no wait with an end, so it is asked again and again."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.002)
