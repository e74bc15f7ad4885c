"""Read files that anyone may have written, and report everything that is wrong with them, each problem with its place.

Functions that read raise `unreadable(...)`; `named` turns it into an error of the caller's kind that names the file.
"""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, TypeVar

from pydantic import ValidationError

from autopart.files.limits import MAX_BYTES, MOST_PROBLEMS, SHOWN, SHOWN_CHARACTERS
from autopart.ir.decision import Problem
from autopart.ir.errors import AutopartError, shortened

Content = TypeVar("Content")
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class _Unreadable(AutopartError):
    """A problem of a file whose name is not known yet."""


def unreadable(what: str, *, where: str = "", why: str = "", fix: str = "") -> Exception:
    """Return a problem to raise inside `named`.  what: follows the name of the file, as "is not valid JSON"."""
    return _Unreadable(what, where=where, why=why, fix=fix)


@contextmanager
def named(name: str | os.PathLike[str], kind: type[AutopartError], fix: str = "") -> Iterator[None]:
    """Raise problems from inside as errors of this kind that name the file.  fix: for problems without one."""
    try:
        yield
    except _Unreadable as problem:
        what, cause = f"{os.fspath(name)} {problem.what}", problem.__cause__
        raise kind(what, where=problem.where, why=problem.why, fix=problem.fix or fix) from cause


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read its bytes.  A pipe or a device is refused and never waited for.  Raises OSError."""
    descriptor = os.open(path, _OPEN)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return open(descriptor, "rb")


def read_text(
    path: str | os.PathLike[str], *, most_bytes: int = MAX_BYTES, opened: Callable[[Any], BinaryIO] = open_regular
) -> str:
    """Read a whole UTF-8 file.  opened: opens it.  Raises `unreadable`."""
    try:
        with opened(path) as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        fix = "" if isinstance(error, PermissionError) else "check the path"
        raise unreadable("cannot be read", why=reason, fix=fix) from error
    if len(raw) > most_bytes:
        raise unreadable("is too large", why=f"at most {most_bytes >> 10} KiB are read")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable("is not UTF-8 text", where=f"byte {error.start}") from error


# ---- problems of a document ------------------------------------------------------------------------------------------


def malformed(what: str, problems: list[Problem], fix: str = "") -> Exception:
    """Return one problem to raise inside `named` that lists several."""
    if len(problems) == 1:
        return unreadable(what, where=problems[0][0], why=problems[0][1], fix=fix)
    where = ", ".join(path for path, _ in problems[:SHOWN])
    why = listed(f"{path}: {message}" for path, message in problems)
    return unreadable(f"{what}: {len(problems)} problems", where=where, why=why, fix=fix)


def validated(what: str, validate: Callable[[Any], Content], document: Any, fix: str = "") -> Content:
    """Return what a validator of pydantic makes of a document.

    Raises `unreadable` with everything that is wrong, or for more than `MOST_PROBLEMS` with their number: pydantic
    lists all or none, and each takes memory.
    """
    try:
        return validate(document)
    except ValidationError as error:
        problems = [("the file", f"{error.error_count()} values are wrong, too many to name")]
        if error.error_count() <= MOST_PROBLEMS:
            found = error.errors(include_url=False, include_context=False)
            problems = [(path_of(each["loc"]), _message(each["msg"], each["type"], each["input"])) for each in found]
        raise malformed(what, problems, fix) from error


def _message(text: str, kind: str, found: object) -> str:
    if kind in ("missing", "json_invalid"):
        return text
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return "unknown key"
    if kind == "value_error":
        return text.removeprefix("Value error, ")
    if kind in ("model_type", "dataclass_type"):
        text = "must be a table of keys and values"
    return f"{text.replace('Input should be', 'must be')}, not {brief(found)}"


def path_of(location: Iterable[str | int]) -> str:
    """Write ('stages', 1, 'ranks', 0) as stages[1].ranks[0], and () as "the file"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" if path else shortened(part)
    return path or "the file"


def brief(found: object) -> str:
    """Describe any value in at most 60 characters."""
    shown = _BRIEF.repr(found)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring = 1, 3, 3, SHOWN_CHARACTERS


def listed(lines: Iterable[str]) -> str:
    """Return the lines, indented, for a message; only the first `SHOWN` of them."""
    every = list(lines)
    rest = [f"and {len(every) - SHOWN} more"] if len(every) > SHOWN else []
    return "".join(f"\n    {line}" for line in every[:SHOWN] + rest)
