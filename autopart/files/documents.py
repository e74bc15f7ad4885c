"""Parse text in JSON, YAML or TOML to plain objects, lists, texts and numbers, within the limits of files (`limits`).

Every language is as strict as JSON: no key twice, no dates, no tags, only texts as keys, numbers finite and of at most
63 bits.  The parsers raise `reading.unreadable` with the line or the path inside the text.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from autopart.files.limits import (
    MAX_BYTES,
    MAX_BYTES_BY_HAND,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_DOTS,
    MAX_INTEGER,
    MAX_VALUES,
    MAX_VALUES_BY_HAND,
)
from autopart.files.reading import brief, path_of, read_text, unreadable
from autopart.ir.decision import Problem

_TOO_DEEP = f"objects and lists are nested more than {MAX_DEPTH} deep"


def parse_json(text: str) -> Any:
    """Parse a JSON text."""
    if len(text) > MAX_BYTES:
        raise unreadable("is too large", why=f"at most {MAX_BYTES >> 10} KiB are read")
    if sum(map(text.count, ",[{")) > MAX_VALUES:  # signs inside of texts count too: names and notes have few
        raise unreadable("is not valid JSON", why=f"it has more values than {MAX_VALUES}")
    try:
        found = json.loads(
            text,
            parse_int=lambda digits: int(digits[: MAX_DIGITS + 2]),  # more digits are too large as well
            parse_constant=float,  # NaN is refused with its path
            object_pairs_hook=_table,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise unreadable("is not valid JSON", where=where, why=error.msg) from error
    except RecursionError as error:
        raise unreadable("is not valid JSON", why=_TOO_DEEP) from error
    return _checked(found, "JSON")


def _parse_yaml(text: str) -> Any:
    """Parse a YAML text of one document, without tags.  Aliases and merges count as what they stand for."""
    try:
        found = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise unreadable("is not valid YAML", where=where, why=why) from error
    return _checked(found, "YAML")


def _parse_toml(text: str) -> Any:
    """Parse a TOML text.  Dots of a line are limited: tomllib's time grows with the square of the parts of a key."""
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise unreadable("is not valid TOML", why=f"a line has more dots than {MAX_DOTS}")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        why, _, place = str(error).partition(" (at ")
        raise unreadable("is not valid TOML", where=place.rstrip(")"), why=why) from error
    return _checked(document, "TOML")


PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
    ".json": parse_json,
}
"""The parser for each ending of a file's name."""


def read_document(path: Path) -> Any:
    """Read and parse a file whose ending is a key of `PARSERS`."""
    parse = PARSERS[path.suffix.lower()]
    return parse(read_text(path, most_bytes=MAX_BYTES if parse is parse_json else MAX_BYTES_BY_HAND))


def _checked(document: Any, language: str) -> Any:
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


class _Twice(dict[str, Any]):
    """An object of a JSON text in which a key appeared twice."""

    key: str


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) == len(pairs):
        return table
    marked = _Twice(table)
    marked.key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return marked


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads safe YAML without tags and duplicate keys, and counts values.  Dates stay text, as in JSON."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        sign: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for sign, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._size_of: dict[int, int] = {}  # values in a node that an alias may stand for, by its identity

    def compose_node(self, parent: yaml.Node, index: Any) -> Any:
        """Compose a node within the limits; called for every node before its content is read."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            known = super().compose_node(parent, index)
            if id(known) not in self._size_of:
                raise _refused("an alias is inside of what it stands for", event)
            self._count(self._size_of[id(known)], event)
            return known
        if event.tag is not None:
            raise _refused(f"tags such as {brief(event.tag)} are not read", event)
        before = self._values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"lists and tables are nested more than {MAX_DEPTH} deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._size_of[id(node)] = self._values - before
        if isinstance(node, yaml.ScalarNode):
            if node.tag.endswith((":int", ":float")) and len(node.value) > 2 * MAX_DIGITS:
                raise _refused("the number has too many digits", event)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise _refused("keys must be texts", key)
                if key.value in seen:
                    raise _refused(f"key {brief(key.value)} appears twice", key)
                seen.add(key.value)
        return node

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > MAX_VALUES_BY_HAND:
            raise _refused(f"it has more values than {MAX_VALUES_BY_HAND}, aliases spelled out", event)


def _refused(problem: str, at: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
