"""Read and write what is kept between runs: files of the cache that only this user can have written.

A kept file is believed if the file and every folder from its own up to the cache folder belong to this user and nobody
else can write to them.  What it says is validated by its reader like any other file.  A file that is not believed is
ignored with a `CacheWarning` and replaced.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopart.files.reading import Source, read_text, source_of
from autopart.files.storage import cache_folder, write_whole
from autopart.ir.errors import AutopartError
from autopart.ir.printable import printable

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheWarning(UserWarning):
    """Warns that a kept file was ignored; a new one takes its place."""


def read_kept(path: Path) -> str | None:
    """Return the text of a kept file, or None when there is no file.  Raises AutopartError for one to ignore."""
    source = kept_source(path)
    try:
        for folder in _folders(path):
            _check_own(folder, os.lstat(folder), source)
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise source.error("cannot be read", why=error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise source.error("cannot be read", why="it is not a regular file")
    _check_own(path, found, source)
    return read_text(path, source)


def write_kept(path: Path, text: str) -> None:
    """Keep a text in this file.  Folders that are missing are made, for this user alone.

    Raises AutopartError where others can write to a folder, OSError for what cannot be written.
    """
    make_private(path.parent)
    for folder in _folders(path):
        _check_own(folder, os.lstat(folder), kept_source(path))
    write_whole(path, text, mode=_PRIVATE_FILE)


def make_private(folder: Path) -> None:
    """Make a folder and those above it where they are missing, for this user alone.  Raises OSError."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(_PRIVATE_FOLDER, exist_ok=True)


def kept_source(path: Path) -> Source:
    """Return a kept file as a source, for messages."""
    return source_of(path, AutopartError)


def warn_ignored(path: Path, error: AutopartError) -> None:
    """Warn that a kept file is ignored, and say why."""
    warnings.warn(printable(f"{path} is ignored and replaced: {error}", keep="\n"), CacheWarning, stacklevel=2)


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folders from the cache folder down to the one of this file; only the latter for a file elsewhere."""
    root, inner = cache_folder(), path.parent
    between = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    yield from reversed(between or [inner])


def _check_own(path: Path, found: os.stat_result, source: Source) -> None:
    """Raise the source's error unless this is a file or folder, no link, that only this user can write to."""
    if stat.S_ISLNK(found.st_mode):
        raise source.error("is not read", why=f"{path} is a link", fix="set AUTOPART_CACHE to a folder of your own")
    if path != Path(source.name) and not stat.S_ISDIR(found.st_mode):
        raise source.error("is not read", why=f"{path} is not a folder", fix="set AUTOPART_CACHE to another folder")
    if found.st_uid != os.geteuid():
        raise source.error("is not read", why=f"{path} belongs to another user", fix="set AUTOPART_CACHE to your own")
    if found.st_mode & _OTHERS_WRITE:
        why = f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):o})"
        raise source.error("is not read", why=why, fix="take their right with chmod go-w, or set AUTOPART_CACHE")
