"""Read and write files that are kept between runs.

They lie in a folder of this user's own, and their content is validated like that of any other file.  One that is not
valid is ignored with a `CacheWarning` and replaced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from autopart.files.reading import named, read_text
from autopart.files.storage import write_whole
from autopart.ir.errors import AutopartError, printable

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
Content = TypeVar("Content")


class CacheWarning(UserWarning):
    """Warns that a kept file was ignored; a new one replaces it."""


def read_kept(path: Path, parse: Callable[[str], Content]) -> Content | None:
    """Return what `parse` makes of the text of a kept file; None if there is no file, or one to ignore.

    parse: raises AutopartError, or `unreadable`, for content that is not valid.
    """
    try:
        with named(path, AutopartError):
            return parse(read_text(path))
    except AutopartError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            warnings.warn(printable(f"{path} is ignored and replaced: {error}", keep="\n"), CacheWarning, stacklevel=3)
        return None


def write_kept(path: Path, text: str) -> None:
    """Write a kept file; missing folders are made, for this user alone.  Raises OSError."""
    make_private(path.parent)
    write_whole(path, text, mode=_PRIVATE_FILE)


def make_private(folder: Path) -> None:
    """Make a folder and missing folders above it, for this user alone.  Raises OSError."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(_PRIVATE_FOLDER, exist_ok=True)


def remove_oldest(folder: Path, most: int) -> None:
    """Remove the oldest JSON files of a folder above `most`; another process may do so at the same time."""
    aged = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged)[: max(0, len(aged) - most)]:
        with suppress(OSError):
            os.unlink(path)
