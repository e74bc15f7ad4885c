"""Parse JSON text within the limits of files (`limits`), and check the rules of every language of files.

No key appears twice, numbers are finite and have at most 63 bits.  Problems are raised as `reading.unreadable`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autopart.files.limits import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_INTEGER, MAX_VALUES
from autopart.files.reading import brief, path_of, unreadable
from autopart.ir.decision import Problem

_TOO_DEEP = f"objects and lists are nested more than {MAX_DEPTH} deep"


def parse_json(text: str) -> Any:
    """Parse a JSON text.  Problems name the line or the path inside the text."""
    check_length(text, MAX_BYTES)
    if sum(map(text.count, ",[{")) > MAX_VALUES:  # signs inside of texts count too: names and notes have few
        raise unreadable("is not valid JSON", why=f"it has more values than {MAX_VALUES}")
    try:
        found = json.loads(
            text, parse_int=_integer, parse_constant=float, object_pairs_hook=_table  # NaN is refused with its path
        )  # fmt: skip
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise unreadable("is not valid JSON", where=where, why=error.msg) from error
    except RecursionError as error:
        raise unreadable("is not valid JSON", why=_TOO_DEEP) from error
    return checked(found, "JSON")


def check_length(text: str, most: int) -> None:
    """Refuse a text of more than `most` characters."""
    if len(text) > most:
        raise unreadable("is too large", why=f"at most {most >> 10} KiB are read")


def checked(document: Any, language: str) -> Any:
    """Return the document; refuse it for the first value that the rules forbid."""
    for where, why in _problems(document, ()):
        raise unreadable(f"is not valid {language}", where=where, why=why)
    return document


def _problems(node: Any, place: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yield the values that a document must not have, as (path, message).  O(values)."""
    if isinstance(node, dict | list):
        if len(place) > MAX_DEPTH:
            yield path_of(place[:3]), _TOO_DEEP
            return
        if isinstance(node, _Twice):
            yield path_of(place), f"key {brief(node.key)} appears twice in one object"
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(node, dict) and type(key) is not str:
                yield path_of(place), f"keys must be texts, not {brief(key)}"
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
    """Read a whole number; if it is too long, only the first digits, which are too large as well."""
    return int(digits[: MAX_DIGITS + 2])


class _Twice(dict[str, Any]):
    """An object of a text in which a key appeared twice."""

    key: str


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) == len(pairs):
        return table
    marked = _Twice(table)
    marked.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return marked
