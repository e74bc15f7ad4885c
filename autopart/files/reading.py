"""Reading files that anyone may have written: limited in size, strict, every problem with its place."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from autopart.ir.errors import AutopartError
from autopart.ir.plan import Problem

MAX_BYTES = 256 * 2**20  # of any file we read; a plan of 100 000 ops has 4 MiB
SHOWN = 20  # problems and differences printed at most


def read_text(path: str | os.PathLike[str], kind: type[AutopartError]) -> str:
    """A whole UTF-8 file; raises `kind` when it cannot be read, is not text, or is too large."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise _too_large(os.fspath(path), kind)
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise kind(f"cannot read {os.fspath(path)}", why=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise kind(f"{os.fspath(path)} is not UTF-8 text", where=f"byte {error.start}") from error


def _too_large(source: str, kind: type[AutopartError]) -> AutopartError:
    return kind(f"{source} is too large", why=f"the limit is {MAX_BYTES >> 20} MiB")


def parse_json(text: str, source: str, kind: type[AutopartError]) -> Any:
    """Strict JSON: no NaN or Infinity, no key twice.  Raises `kind` with line and column."""
    if len(text) > MAX_BYTES:
        raise _too_large(source, kind)
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise kind(f"{source} is not valid JSON", where=where, why=error.msg) from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{source} is not valid JSON", why=str(error)) from error


def problems_of(error: ValidationError) -> list[Problem]:
    """What pydantic found, as (path, message) with paths like stages[1].ranks[0]."""
    return [(path_of(e["loc"]), _message(e["msg"], e["type"], e["input"])) for e in error.errors(include_url=False)]


def path_of(location: Iterable[str | int]) -> str:
    """('stages', 1, 'ranks', 0) as stages[1].ranks[0]."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


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


def brief(found: object) -> str:
    """What was found, in at most 60 characters, whatever it is."""
    shown = _BRIEF.repr(found)
    return shown if len(shown) <= 60 else shown[:57] + "..."


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring = 1, 3, 3, 60


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
    return table


def listed(lines: Iterable[str]) -> str:
    """Lines of a message, indented; the first `SHOWN` of them."""
    every = list(lines)
    rest = [f"and {len(every) - SHOWN} more"] if len(every) > SHOWN else []
    return "".join(f"\n    {line}" for line in every[:SHOWN] + rest)
