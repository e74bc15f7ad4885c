"""What the functions of a model mention of the Python around them: globals, and variables of enclosing functions."""

from __future__ import annotations

import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from autopart.capture.fingerprint import fingerprint, is_plain
from autopart.capture.observed import ABSENT

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))


class Reading:
    """A name that forward() read from a dictionary of Python: a module's attributes, or a function's globals."""

    def __init__(self, home: dict[str, Any], name: str, place: str) -> None:
        self.home, self.name, self.place = home, name, place
        self.value = self.now()
        self._before = None if is_plain(self.value) else fingerprint(self.value)

    def now(self) -> Any:
        """What stands there now."""
        return self.home.get(self.name, ABSENT)

    def changed(self) -> bool:
        """Whether that is other than at first."""
        now = self.now()
        if is_plain(self.value):
            return not (type(now) is type(self.value) and (now == self.value or repr(now) == repr(self.value)))
        return now is not self.value or fingerprint(now) != self._before


class Attribute(Reading):
    """An attribute of a module, or where it has none of its class."""

    def __init__(self, module: nn.Module, name: str, place: str) -> None:
        self._kind = type(module)
        super().__init__(vars(module), name, place)

    @property
    def inherited(self) -> bool:
        """Whether the class has it."""
        return self.name not in self.home

    def now(self) -> Any:
        """What stands there now."""
        return self.home.get(self.name, getattr(self._kind, self.name, ABSENT))


class Cell(Reading):
    """A variable of the function around a function."""

    def __init__(self, cell: types.CellType, place: str) -> None:
        self._cell = cell
        super().__init__({}, "", place)

    def now(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not yet assigned
            return ABSENT


def surroundings(things: Iterable[Any]) -> list[Reading]:
    """Plain globals, and variables of enclosing functions, that these classes and functions mention, and functions of
    the user's that they call by name.  O(their code); installed libraries are left out."""
    found: dict[tuple[int, str], Reading] = {}
    seen: set[types.FunctionType] = set()
    queue = [function for thing in things for function in _functions(thing)]
    while queue:
        function = queue.pop()
        if function in seen or function.__code__.co_filename.startswith(_LIBRARIES):
            continue
        seen.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if is_plain(value) and not isinstance(value, type) and not name.startswith("__"):
                place = f"{function.__module__}.{name}"
                found.setdefault((id(function.__globals__), name), Reading(function.__globals__, name, place))
            else:
                queue.extend(_functions(value))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            reading = Cell(cell, f"{function.__qualname__}: {name}")
            inner = list(_functions(reading.value))
            queue.extend(inner)
            if not inner and name != "__class__":
                found.setdefault((id(cell), name), reading)
    return list(found.values())


def _functions(thing: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a function, a method, a partial, a decorated function or a class of the user's."""
    if isinstance(thing, type):
        for member in vars(thing).values():
            if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                yield from _functions(member)
        return
    if isinstance(thing, types.FunctionType):
        yield thing
    for attribute in ("__func__", "func", "__wrapped__", "fget"):
        inner = getattr(thing, attribute, None) if callable(thing) or isinstance(thing, property) else None
        if isinstance(inner, types.FunctionType) and inner is not thing:
            yield inner


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
