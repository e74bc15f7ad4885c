"""Parse JSON text within the limits of files (`limits`), and check what holds for every language of files.

The limits keep parsing quick and small, whatever a text says.  No key stands twice, numbers are finite and have at most
63 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from autopart.files.limits import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_INTEGER, MAX_VALUES
from autopart.files.reading import Source, brief, path_of
from autopart.ir.plan import Problem

_TOO_DEEP = f"objects and lists stand in each other more than {MAX_DEPTH} deep"


def parse_json(text: str, source: Source) -> Any:
    """Parse a JSON text.  Raises the source's error, with the line or the path inside the text."""
    check_length(text, source, MAX_BYTES)
    if sum(map(text.count, ",[{")) > MAX_VALUES:  # signs inside of texts count too: names and notes have few
        raise source.error("is not valid JSON", why=f"it has more values than {MAX_VALUES}")
    try:
        found = json.loads(
            text, parse_int=_integer, parse_constant=float, object_pairs_hook=_table  # NaN is refused with its path
        )  # fmt: skip
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise source.error("is not valid JSON", where=where, why=error.msg) from error
    except RecursionError as error:
        raise source.error("is not valid JSON", why=_TOO_DEEP) from error
    return checked(found, source, "JSON")


def check_length(text: str, source: Source, most: int) -> None:
    """Raise the source's error for a text of more characters."""
    if len(text) > most:
        raise source.error("is too large", why=f"at most {most >> 10} KiB are read")


def checked(document: Any, source: Source, language: str) -> Any:
    """Return the document.  Raises the source's error for the first thing in it that the limits forbid."""
    for where, why in _problems(document, ()):
        raise source.error(f"is not valid {language}", where=where, why=why)
    return document


def _problems(node: Any, place: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield what a document must not hold, as (path, message).  O(values)."""
    if isinstance(node, dict | list):
        if len(place) > MAX_DEPTH:
            yield path_of(place[:3]), _TOO_DEEP
            return
        if isinstance(node, _Twice):
            yield path_of(place), f"key {brief(node.key)} appears twice in one object"
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(node, dict) and type(key) is not str:
                yield path_of(place), f"keys are texts, not {brief(key)}"
            elif type(item) is not str:
                yield from _problems(item, (*place, key))
    elif isinstance(node, int):
        if abs(node) > MAX_INTEGER:
            yield path_of(place), f"a whole number of {node.bit_length()} bits or more; 63 bits are read"
    elif isinstance(node, float):
        if not math.isfinite(node):
            yield path_of(place), f"must be a finite number, not {node}"
    elif node is not None and not isinstance(node, str):
        yield path_of(place), f"must be a text or a number, not a {type(node).__name__}"


def _integer(digits: str) -> int:
    """Read a whole number; of one that is too long only the first digits, which are too large as well."""
    return int(digits[: MAX_DIGITS + 2])


class _Twice(dict[str, Any]):
    """Mark an object in which a key stood twice."""

    key: str


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) == len(pairs):
        return table
    seen: set[str] = set()
    marked = _Twice(table)
    for key, _ in pairs:
        if key in seen:
            marked.key = key
            break
        seen.add(key)
    return marked
