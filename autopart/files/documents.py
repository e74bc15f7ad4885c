"""Parse text in YAML, TOML or JSON to plain objects, lists, texts and numbers, within the limits of files (`limits`).

Every language is as strict as JSON (`json_text`): no key twice, no dates, no tags, only texts as keys.  The parsers
raise `reading.unreadable`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from autopart.files.json_text import check_length, checked, parse_json
from autopart.files.limits import MAX_BYTES, MAX_BYTES_BY_HAND, MAX_DEPTH, MAX_DIGITS, MAX_DOTS, MAX_VALUES_BY_HAND
from autopart.files.reading import brief, read_text, unreadable


def parse_yaml(text: str) -> Any:
    """Parse a YAML text of one document, without tags.  Aliases and merges count as what they stand for."""
    check_length(text, MAX_BYTES_BY_HAND)
    try:
        found = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise unreadable("is not valid YAML", where=where, why=why) from error
    return checked(found, "YAML")


def parse_toml(text: str) -> Any:
    """Parse a TOML text.  Dots of a line are limited: tomllib's time grows with the square of the parts of a key."""
    check_length(text, MAX_BYTES_BY_HAND)
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise unreadable("is not valid TOML", why=f"a line has more dots than {MAX_DOTS}")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        why, _, place = str(error).partition(" (at ")
        raise unreadable("is not valid TOML", where=place.rstrip(")"), why=why) from error
    return checked(document, "TOML")


PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
    ".toml": parse_toml,
    ".json": parse_json,
}
"""The parser for each ending of a file's name."""


def read_document(path: Path) -> Any:
    """Read and parse a file whose ending is a key of `PARSERS`."""
    parse = PARSERS[path.suffix.lower()]
    return parse(read_text(path, most_bytes=MAX_BYTES if parse is parse_json else MAX_BYTES_BY_HAND))


# ---- YAML ----------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads safe YAML within the limits, without duplicate keys."""

    # Dates stay text, as in JSON.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        sign: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for sign, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._size_of: dict[int, int] = {}  # values in a node with an anchor, by its identity

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
        if event.anchor is not None:
            self._size_of[id(node)] = self._values - before
        self._check(node, event)
        return node

    def _count(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > MAX_VALUES_BY_HAND:
            raise _refused(f"it has more values than {MAX_VALUES_BY_HAND}, aliases spelled out", event)

    def _check(self, node: yaml.Node, event: yaml.Event) -> None:
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


def _refused(problem: str, at: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
