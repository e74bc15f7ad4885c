"""Bytes of files that anyone may have written, and messages about what they say: every problem with its place."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from autopart.files.limits import MAX_BYTES, SHOWN, SHOWN_CHARACTERS
from autopart.ir.errors import AutopartError
from autopart.ir.printable import shortened

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Source:
    """Where a text comes from.  name: what messages call it; kind: of its errors; fix: the remedy that they give."""

    name: str
    kind: type[AutopartError]
    fix: str = ""

    def error(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> AutopartError:
        """That something is wrong with it."""
        return self.kind(f"{self.name} {what}", where=where, why=why, fix=fix or self.fix)


def source_of(path: str | os.PathLike[str], kind: type[AutopartError], fix: str = "") -> Source:
    """A file as a source."""
    return Source(os.fspath(path), kind, fix)


def read_text(path: str | os.PathLike[str], source: Source, *, most_bytes: int = MAX_BYTES) -> str:
    """A whole UTF-8 file.

    Raises the source's error when it cannot be read, is no regular file (a pipe or a device is opened, but never
    waited for), is too large, or is not text.
    """
    return _text(_opened(path, source), source, most_bytes)


def read_own_text(path: str | os.PathLike[str], source: Source, *, most_bytes: int = MAX_BYTES) -> str | None:
    """A whole UTF-8 file that nobody but this user can have written; None when there is none.

    The file and its folder must be this user's, writable by no one else, and no links.  Raises the source's error.
    """
    folder, name = os.path.split(os.fspath(path))
    try:
        opened = os.open(folder or ".", _OPEN | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(source, error, "the folder of a cache is a folder, not a link to one") from error
    try:
        _check_own(os.fstat(opened), source, f"its folder {folder or '.'}")
        found = _opened(name, source, in_folder=opened)
    except FileNotFoundError:
        return None
    finally:
        os.close(opened)
    return _text(found, source, most_bytes, own=True)


def check_own_folder(folder: str | os.PathLike[str], source: Source) -> None:
    """Raises the source's error unless nobody but this user can write into the folder."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise _unreadable(source, error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise source.error("cannot be written", why=f"{os.fspath(folder)} is no folder")
    _check_own(found, source, f"its folder {os.fspath(folder)}")


def _opened(path: str | os.PathLike[str], source: Source, in_folder: int | None = None) -> int:
    """A descriptor.  in_folder: the folder of one of our own files, in which links are not followed."""
    try:
        if in_folder is None:
            return os.open(path, _OPEN)
        return os.open(path, _OPEN | os.O_NOFOLLOW, dir_fd=in_folder)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        if in_folder is not None and isinstance(error, FileNotFoundError):
            raise
        raise _unreadable(source, error) from error


def _text(descriptor: int, source: Source, most_bytes: int, *, own: bool = False) -> str:
    """What an open file holds; closes it.  The descriptor is looked at, not the path: that may change in between."""
    try:
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise source.error("cannot be read", why="it is not a regular file")
            if own:
                _check_own(found, source, "it")
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise _unreadable(source, error) from error
    if len(raw) > most_bytes:
        raise source.error("is too large", why=f"at most {most_bytes >> 10} KiB are read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise source.error("is not UTF-8 text", where=f"byte {error.start}") from error


def _check_own(found: os.stat_result, source: Source, what: str) -> None:
    if found.st_uid != os.geteuid():
        raise source.error("is not read", why=f"{what} belongs to another user", fix="set AUTOPART_CACHE to your own")
    if found.st_mode & _OTHERS_WRITE:
        why = f"{what} can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
        raise source.error("is not read", why=why, fix="take their right with chmod go-w, or set AUTOPART_CACHE")


def _unreadable(source: Source, error: OSError | ValueError, why: str = "") -> AutopartError:
    reason = why or getattr(error, "strerror", None) or str(error)
    missing = isinstance(error, FileNotFoundError)
    return source.kind(f"cannot read {source.name}", why=reason, fix="check the path" if missing else source.fix)


# ---- messages ------------------------------------------------------------------------------------------------------


def path_of(location: Iterable[str | int]) -> str:
    """('stages', 1, 'ranks', 0) as stages[1].ranks[0]."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" if path else shortened(part)
    return path


def brief(found: object) -> str:
    """What was found, in at most 60 characters, whatever it is."""
    shown = _BRIEF.repr(found)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring = 1, 3, 3, SHOWN_CHARACTERS


def listed(lines: Iterable[str]) -> str:
    """Lines of a message, indented; the first `SHOWN` of them."""
    every = list(lines)
    rest = [f"and {len(every) - SHOWN} more"] if len(every) > SHOWN else []
    return "".join(f"\n    {line}" for line in every[:SHOWN] + rest)
