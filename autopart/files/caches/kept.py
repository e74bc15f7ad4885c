"""Read and write files that are kept between runs, and trust only those that nobody else can have written.

A kept file is trusted if it and every folder from its own up to the cache folder belong to this user and nobody else
can write to them.  Its content is validated like that of any other file.  A file that is not trusted is ignored with a
`CacheWarning` and replaced.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from autopart.files.reading import named, read_text, unreadable
from autopart.files.storage import cache_folder, write_whole
from autopart.ir.errors import AutopartError
from autopart.ir.printable import printable

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
Content = TypeVar("Content")


class CacheWarning(UserWarning):
    """Warns that a kept file was ignored; a new one replaces it."""


def read_kept(path: Path, parse: Callable[[str], Content]) -> Content | None:
    """Return what `parse` makes of the text of a kept file; None if there is no file, or one to ignore.

    parse: raises AutopartError, or `unreadable`, for content that is not valid.
    """
    try:
        with named(path, AutopartError):
            try:
                _require_own((*_folders(path), path))
            except FileNotFoundError:
                return None
            except OSError as error:
                raise unreadable("cannot be read", why=error.strerror or str(error)) from error
            return parse(read_text(path))
    except AutopartError as error:
        warnings.warn(printable(f"{path} is ignored and replaced: {error}", keep="\n"), CacheWarning, stacklevel=3)
        return None


def write_kept(path: Path, text: str) -> None:
    """Write a kept file; missing folders are made, for this user alone.

    Raises AutopartError if others can write to a folder, OSError if writing fails.
    """
    make_private(path.parent)
    with named(path, AutopartError):
        _require_own(_folders(path))
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


def _folders(path: Path) -> list[Path]:
    """Return the folders from the cache folder down to that of this file; only the latter for a file elsewhere."""
    root, inner = cache_folder(), path.parent
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)][::-1] or [inner]


def _require_own(paths: Iterable[Path]) -> None:
    """Raise `unreadable` for a link, and for a file or folder that others own or can write to."""
    for path in paths:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            why = "is a link"
        elif found.st_uid != os.geteuid():
            why = "belongs to another user"
        elif found.st_mode & _OTHERS_WRITE:
            why = f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            continue
        fix = f"run chmod go-w {path}, or set AUTOPART_CACHE to a folder of your own"
        raise unreadable("is not trusted", why=f"{path} {why}", fix=fix)
