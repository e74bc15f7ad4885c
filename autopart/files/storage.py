"""Where caches lie on disk, and how a file is written: whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """The folder of what is kept between runs: $AUTOPART_CACHE, else autopart/ in the user's cache folder."""
    own = os.environ.get("AUTOPART_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "autopart"


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file so that readers see the old content or the new one, never a part of it.

    The text goes to a file of its own beside the target and takes its place once it is on disk.  When anything fails,
    that file is removed and the target stays as it was.  Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "x", encoding="utf-8") as file:
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
    that ends, and the lock file stays.  The folder has to exist.  Raises OSError.
    """
    with open(path.with_name(f"{path.name}.lock"), "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
