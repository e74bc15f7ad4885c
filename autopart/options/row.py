"""What stands in the row of an option."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from autopart.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class Values:
    """The possible values of an option: words, and others.

    check: whether a value that is not one of the words is possible.  fix: what to use instead of one that is not; "" to
    list the words.  convert: brings a value to the form of its field; one that it cannot is left to the check.  words:
    or a function that returns them, where users may add some.  auto: whether "auto" stands
    for None.
    """

    check: Callable[[Any], bool] = lambda value: False
    fix: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    words: Iterable[str] | Callable[[], Iterable[str]] = ()
    auto: bool = False

    def leaves_open(self, value: Any) -> bool:
        """Return whether a value leaves the option at its default."""
        return value is None or (self.auto and isinstance(value, str) and value == "auto")

    def choices(self) -> tuple[str, ...]:
        """Return the words; () for an option without."""
        return tuple(self.words() if callable(self.words) else self.words)

    def read(self, name: str, value: Any) -> Any:
        """Return a value of the option `name` in the form of its field.  Raises UsageError for an impossible one."""
        value, known = self.convert(value), self.choices()
        if self.check(value) or value in known:
            return value
        if self.fix:
            raise UsageError(f"{name} is {value!r}", fix=self.fix)
        near = difflib.get_close_matches(str(value).lower(), known, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        other = ", or a function of your own" if self.check is callable else ""
        raise UsageError(f"unknown {name} {value!r}", fix=f"{advice}use one of {', '.join(known)}{other}")


@dataclass(frozen=True, slots=True)
class Option:
    """The row of an option: all that is said of it besides name, type and default.

    text: its meaning, for docstrings and the help of its flag.  planned: whether a plan decides it.  group: the heading
    of the group of options that begins with it.
    """

    text: str
    values: Values
    planned: bool = False
    group: str = ""


ANYTHING = Values(lambda value: True)


def option(text: str, values: Values = ANYTHING, *, default: Any = None, planned: bool = False, group: str = "") -> Any:
    """Return the field of an option.  default: its value, or the type that makes it.  The rest: as in `Option`."""
    made = {"default_factory": default} if default is dict else {"default": default}
    return field(**made, metadata={"option": Option(text, values, planned, group)})


def one_of(*words: str) -> Values:
    """Return the values of an option that takes these words."""
    return Values(words=words)
