"""The folder of caches on disk, atomic writes, and a lock between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    with drafted(path, lambda draft: draft.unlink(missing_ok=True)) as draft:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)


@contextmanager
def drafted(path: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    """Give the name of a draft beside a file, which is removed if the block fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield draft
    except BaseException:
        with suppress(OSError):
            remove(draft)
        raise


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system without locks answers, such as NFS without a lock manager."""
_locks: set[int] = set()
"""The descriptors of the locks that this process holds."""


def _leave_to_the_parent() -> None:
    """Close the locks of the process that has forked this one, which would hold them as long as this one lives:
    O_CLOEXEC closes where another program is started, and a fork starts none."""
    for descriptor in _locks:
        with suppress(OSError):
            os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def lock(path: Path) -> int | None:
    """Take the lock that a file stands for, which is made if it is missing; returns what `unlock` is given, None where
    the file system has no locks.

    A process that ends, however, releases its locks; those that it forked do not hold them.  Nobody else may open the
    file, since whoever can may lock it.  Raises BlockingIOError if the lock is taken, also by this process, and
    OSError, also for what is not a regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    _locks.add(descriptor)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        unlock(descriptor)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            return None
        raise
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Release a lock, if this process took it."""
    if descriptor in _locks and descriptor is not None:
        _locks.discard(descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where something else has copied the descriptor
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time read, change and write a file, where the file system has locks; the others wait.

    The lock is on `<name>.lock` beside the file, because `write_whole` replaces the file itself; the lock file stays.
    Raises what `lock` raises, BlockingIOError if the lock is not free after `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:  # flock has no timeout
        try:
            descriptor = lock(path.with_name(f"{path.name}.lock"))
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.002)
    try:
        yield
    finally:
        unlock(descriptor)
