"""Parse text in YAML, TOML or JSON to plain objects, lists, texts and numbers, within the limits of files (`limits`).

Every language is as strict as JSON (`json_text`): no key twice, no dates, no tags, only texts as keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from autopart.files.json_text import check_length, checked, parse_json
from autopart.files.limits import MAX_BYTES, MAX_BYTES_BY_HAND, MAX_DEPTH, MAX_DIGITS, MAX_DOTS, MAX_VALUES_BY_HAND
from autopart.files.reading import Source, brief, read_text, source_of
from autopart.ir.errors import AutopartError

Parser = Callable[[str, Source], Any]


def parse_yaml(text: str, source: Source) -> Any:
    """Parse a YAML text of one document, without tags.  Aliases and merges count as what they stand for."""
    check_length(text, source, MAX_BYTES_BY_HAND)
    try:
        found = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise source.error("is not valid YAML", where=where, why=why) from error
    return checked(found, source, "YAML")


def parse_toml(text: str, source: Source) -> Any:
    """Parse a TOML text.  A key of many parts takes tomllib time that grows with the square of their number."""
    check_length(text, source, MAX_BYTES_BY_HAND)
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise source.error("is not valid TOML", why=f"a line has more dots than {MAX_DOTS}")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        why, _, place = str(error).partition(" (at ")
        raise source.error("is not valid TOML", where=place.rstrip(")"), why=why) from error
    return checked(document, source, "TOML")


PARSERS: dict[str, Parser] = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml, ".json": parse_json}
"""The parser for each ending of a file's name."""


def read_document(path: str, ending: str, kind: type[AutopartError], fix: str) -> Any:
    """Read and parse a file.  ending: a key of `PARSERS`; kind, fix: of its errors."""
    source, parse = source_of(path, kind, fix), PARSERS[ending]
    return parse(read_text(path, source, most_bytes=MAX_BYTES if parse is parse_json else MAX_BYTES_BY_HAND), source)


# ---- YAML ----------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe YAML within the limits, in which no key stands twice: a setting must not be ignored in silence."""

    # A date is a text here, as in JSON.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        sign: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
        for sign, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._size_of: dict[int, int] = {}  # values in a node with an anchor, by its identity

    def compose_node(self, parent: yaml.Node, index: Any) -> Any:
        """As the base class, within the limits: every node passes here before what is inside it is read."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            known = super().compose_node(parent, index)
            if id(known) not in self._size_of:
                raise _refused("an alias stands inside what it stands for", event)
            self._count(self._size_of[id(known)], event)
            return known
        if event.tag is not None:
            raise _refused(f"tags such as {brief(event.tag)} are not read", event)
        before = self._values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"lists and tables stand in each other more than {MAX_DEPTH} deep", event)
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
                    raise _refused("keys are texts", key)
                if key.value in seen:
                    raise _refused(f"key {brief(key.value)} stands twice", key)
                seen.add(key.value)


def _refused(problem: str, at: yaml.Event | yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
