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
    """Read a whole UTF-8 file.

    Raises the source's error when it cannot be read, is not a regular file (a pipe or a device is opened, but never
    waited for), is too large, or is not text.
    """
    try:
        with open(os.open(path, _OPEN), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            raw = file.read(most_bytes + 1) if regular else b""
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        missing = isinstance(error, FileNotFoundError)
        raise source.kind(
            f"cannot read {source.name}", why=reason, fix="check the path" if missing else source.fix
        ) from error
    if not regular:
        raise source.error("cannot be read", why="it is not a regular file")
    if len(raw) > most_bytes:
        raise source.error("is too large", why=f"at most {most_bytes >> 10} KiB are read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise source.error("is not UTF-8 text", where=f"byte {error.start}") from error


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
