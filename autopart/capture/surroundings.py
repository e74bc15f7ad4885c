"""What the functions of a model mention of the Python around them.

Globals and variables of enclosing functions, attributes of the user's modules and classes that stand there, and the
functions themselves: any of them may be another one at the next step.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from autopart.capture.fingerprint import LIBRARIES, fingerprint, from_library, is_plain
from autopart.capture.snapshot import ABSENT


def is_library_file(filename: str) -> bool:
    """Whether a file belongs to an installed library, or to Python."""
    return filename.startswith(LIBRARIES)


class Reading:
    """A name that forward() read: how to read it again, and what it was.

    home: an object of which `name` is an attribute, or a dictionary of which it is a key.  place: for messages.
    """

    def __init__(self, home: Any, name: str, place: str) -> None:
        self.home, self.name, self.place = home, name, place
        self.value = self.now()
        self._before = fingerprint(self.value)

    def now(self) -> Any:
        """What stands there now."""
        if isinstance(self.home, dict):
            return self.home.get(self.name, ABSENT)
        try:
            return getattr(self.home, self.name, ABSENT)
        except ValueError:  # a cell that is not filled
            return ABSENT

    def changed(self) -> bool:
        """Whether that is other than at first."""
        now = self.now()
        if now is self.value and is_plain(now):
            return False
        return bool(fingerprint(now) != self._before)

    def same(self) -> bool:
        """Whether it is what it was."""
        return not self.changed()


class Attribute(Reading):
    """An attribute of a module, or where it has none of its class."""

    def __init__(self, module: nn.Module, name: str, place: str) -> None:
        self.kind = type(module)
        super().__init__(vars(module), name, place)

    def now(self) -> Any:
        """What stands there now."""
        return self.home.get(self.name, getattr(self.kind, self.name, ABSENT))


def surroundings(things: Iterable[Any]) -> list[Reading]:
    """What these classes and functions mention, and functions of the user's that they call by name.  O(their code);
    installed libraries are left out."""
    return list(_Walk(things).found.values())


class _Walk:
    """Through functions, to those that they mention."""

    def __init__(self, things: Iterable[Any]) -> None:
        self.found: dict[tuple[int, str], Reading] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is of one object as long as that is kept
        self._queue = list(things)
        while self._queue:
            self._visit(self._queue.pop())

    def _visit(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        self._kept.append(thing)
        if isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            if not from_library(thing):
                self._members(thing)
        elif isinstance(thing, nn.Module) or is_plain(thing):
            pass
        elif not (inner := list(_functions(thing))):
            self._queue.append(type(thing))  # an object of the user's: its methods read it
        else:
            self._queue.extend(inner)

    def _members(self, kind: type) -> None:
        """A class of the user's: its methods, and what they mention of its other members, inherited ones too."""
        bases = [base for base in kind.__mro__ if not from_library(base)]
        members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
        methods = [member for base in bases for member in vars(base).values() if isinstance(member, _METHODS)]
        mentioned = {word for method in methods for function in _functions(method) for word in _words(function)}
        for name, member in members.items():
            if isinstance(member, _METHODS) or (name in mentioned and not name.startswith("__")):
                self._note(kind, name, f"{kind.__qualname__}.{name}")
        self._queue.extend(function for method in methods for function in _functions(method))

    def _function(self, function: types.FunctionType) -> None:
        if function.__code__.co_filename.startswith(LIBRARIES):
            return
        self._queue.extend(inner for inner in _functions(function) if inner is not function)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._note(function, name, f"{function.__qualname__}.{name}")
        names = _words(function)
        for name in _globals(function) & function.__globals__.keys():
            if not name.startswith("__"):
                self._mentioned(function.__globals__, name, f"{function.__module__}.{name}", names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._note(cell, "cell_contents", f"{function.__qualname__}: {name}")

    def _mentioned(self, home: Any, name: str, place: str, names: set[str]) -> None:
        """A name of a module, or of a class, that a function mentions together with others."""
        value = home.get(name, ABSENT) if isinstance(home, dict) else getattr(home, name, ABSENT)
        self._note(home, name, place)
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if file is None or file.startswith(LIBRARIES):
                return
        elif not isinstance(value, type) or from_library(value):
            return
        for inner in names & vars(value).keys():
            if (id(value), inner) not in self.found and not inner.startswith("__"):
                self._mentioned(value, inner, f"{place}.{inner}", names)

    def _note(self, home: Any, name: str, place: str) -> None:
        key = (id(home), name)
        if key not in self.found:
            reading = self.found[key] = Reading(home, name, place)
            self._queue.append(reading.value)


_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


def _words(function: types.FunctionType) -> set[str]:
    """The names that a function mentions: globals and attributes."""
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _globals(function: types.FunctionType) -> set[str]:
    """The names that a function looks up in its module, and not as attributes."""
    found = (step for code in _codes(function.__code__) for step in dis.get_instructions(code))
    return {step.argval for step in found if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _functions(thing: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a function, a method, a partial, a property or a decorated function."""
    if isinstance(thing, types.FunctionType):
        yield thing
    for attribute in ("__func__", "func", "__wrapped__", "fget"):
        inner = getattr(thing, attribute, None)
        if isinstance(inner, types.FunctionType) and inner is not thing:
            yield inner


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
