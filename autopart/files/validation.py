"""What pydantic found wrong with a file, in the words of our messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from autopart.files.limits import MOST_PROBLEMS, SHOWN
from autopart.files.reading import brief, path_of
from autopart.ir.plan import Problem

_MOST_KEYS = 100  # more than any table of ours has


def problems_of(
    error: ValidationError, document: Any, again: Callable[[Any], object], known: frozenset[str]
) -> list[Problem]:
    """What pydantic found, as (path, message) with paths like stages[1].ranks[0].

    It tells all or nothing, and of a long list of wrong entries that is too much: then `again` validates the document
    with its lists cut short.  known: keys that tables may have.
    """
    count = error.error_count()
    if count <= MOST_PROBLEMS:
        return _told(error)
    try:
        again(_shortened(document, known))
    except ValidationError as fewer:
        return [*_told(fewer)[: SHOWN - 1], ("and more", f"there are {count} problems in all")]
    return [("the file", f"{count} values are wrong, all behind the first {SHOWN} of long lists")]


def _told(error: ValidationError) -> list[Problem]:
    return [(path_of(e["loc"]), _message(e["msg"], e["type"], e["input"])) for e in error.errors(include_url=False)]


def _shortened(node: Any, known: frozenset[str]) -> Any:
    """The first entries of every list, and of a table with too many keys the known ones first."""
    if isinstance(node, list):
        return [_shortened(item, known) for item in node[:SHOWN]]
    if isinstance(node, dict):
        keys = sorted(node, key=lambda key: key not in known)[:_MOST_KEYS]
        return {key: _shortened(node[key], known) for key in keys}
    return node


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
