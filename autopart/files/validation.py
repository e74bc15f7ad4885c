"""Say what pydantic found wrong with a file in the words of our messages."""

from __future__ import annotations

from pydantic import ValidationError

from autopart.files.limits import MOST_PROBLEMS
from autopart.files.reading import brief, path_of
from autopart.ir.plan import Problem


def problems_of(error: ValidationError) -> list[Problem]:
    """Return what pydantic found, as (path, message) with paths like stages[1].ranks[0].

    Of more than `MOST_PROBLEMS` only the number is told: pydantic lists all or none, and each takes memory.
    """
    count = error.error_count()
    if count > MOST_PROBLEMS:
        return [("the file", f"{count} values are wrong, too many to name")]
    found = error.errors(include_url=False, include_context=False)
    return [(path_of(each["loc"]), _message(each["msg"], each["type"], each["input"])) for each in found]


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
