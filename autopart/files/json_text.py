"""JSON text to plain objects, lists, texts and numbers, within the limits of files; and what holds in every language.

Nothing that a text says makes this slow or large: depth and number of values are counted before anything is made of
them.  Strict: no key twice, and no number that is not finite or needs more than 63 bits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from autopart.files.limits import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, MAX_INTEGER, MAX_VALUES
from autopart.files.reading import Source, brief, path_of
from autopart.ir.plan import Problem

_Place = tuple[str | int, ...]


def parse_json(text: str, source: Source) -> Any:
    """A JSON text.  Raises the source's error, with the line or the path inside the text."""
    check_length(text, source, MAX_BYTES)
    _scan_json(text, source)
    try:
        found = json.loads(
            text, parse_int=_integer, parse_constant=float, object_pairs_hook=_table  # NaN is refused with its path
        )  # fmt: skip
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise source.error("is not valid JSON", where=where, why=error.msg) from error
    except (ValueError, RecursionError) as error:
        raise source.error("is not valid JSON", why=str(error)) from error
    return checked(found, source, "JSON")


def check_length(text: str, source: Source, most: int) -> None:
    """Raises the source's error for a text of more characters."""
    if len(text) > most:
        raise source.error("is too large", why=f"at most {most >> 10} KiB are read")


def line_of(text: str, at: int) -> int:
    """Number of the line in which a character stands."""
    return text.count("\n", 0, at) + 1


# ---- what holds in every language ----------------------------------------------------------------------------------


def checked(document: Any, source: Source, language: str) -> Any:
    """The document, unless it holds what the limits forbid; the first such thing is named."""
    for where, why in _problems(document, ()):
        raise source.error(f"is not valid {language}", where=where, why=why)
    return document


def _problems(node: Any, place: _Place) -> Iterator[Problem]:
    """What cannot stand in a document, as (path, message).  O(values)."""
    if isinstance(node, dict | list):
        if len(place) > MAX_DEPTH:
            yield path_of(place[:3]), f"objects and lists stand in each other more than {MAX_DEPTH} deep"
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


# ---- JSON ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)


def _scan_json(text: str, source: Source) -> None:
    """Depth and number of values, before anything is made of them.  O(text)."""
    depth = values = texts = 0
    for found in _TOKEN.finditer(text):
        sign = text[found.start()]
        if sign == '"':
            texts += 1  # keys and values
            if texts <= 2 * MAX_VALUES:
                continue
        if sign in "]}":
            depth -= 1
            continue
        values += 1
        depth += sign in "[{"
        if depth > MAX_DEPTH or values > MAX_VALUES or texts > 2 * MAX_VALUES:
            where = f"line {line_of(text, found.start())}"
            limit = f"brackets in each other than {MAX_DEPTH}" if depth > MAX_DEPTH else f"values than {MAX_VALUES}"
            raise source.error("is not valid JSON", where=where, why=f"it has more {limit}")


def _integer(digits: str) -> int:
    """A whole number; of one that is too long the first digits, which are too large as well."""
    return int(digits[: MAX_DIGITS + 2])


class _Twice(dict[str, Any]):
    """An object in which a key stood twice."""

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
