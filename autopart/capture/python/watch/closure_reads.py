"""The Python around a model: one walk through everything that forward() and the loss can reach.

It starts at modules and functions, and notes a `Reading` for all that a function mentions (code, defaults, globals,
variables of enclosing functions) and for the members of the user's classes.  It also lists the objects that it meets:
`observed` notes what forward() reads of them at the moment when it reads it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopart.capture.python.watch.fingerprint import (
    ABSENT,
    attributes_of,
    fingerprint,
    from_library,
    is_followed,
    is_plain,
    parts,
)
from autopart.capture.source_location import LIBRARIES

MODULES_OWN = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
"""Attributes of every module: parameters, buffers, hooks, the training flag.  They are compared separately; what
`model.compile()` leaves is no part of a capture."""
WHOLE = "__dict__"
_DEPTH = 6
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


@dataclass(eq=False)
class Reading:
    """A name that forward() read: how to read it again, and the value that it had.

    home: an object with attribute `name` (`WHOLE`: all attributes), or a dictionary with key `name`.  place: its name
    in messages.  owner: the object whose attribute it is, or whose class has it; None for what functions mention.
    """

    home: Any
    name: str
    place: str
    owner: Any = None

    def __post_init__(self) -> None:
        self.value = self.now()
        self._before = fingerprint(self.value)

    def now(self) -> Any:
        """Return the value that it has now."""
        if isinstance(self.home, dict):
            found = self.home.get(self.name, ABSENT)
            return found if found is not ABSENT or self.owner is None else getattr(type(self.owner), self.name, ABSENT)
        if self.name == WHOLE:
            own = MODULES_OWN if isinstance(self.home, nn.Module) else ()
            return {key: value for key, value in (attributes_of(self.home) or {}).items() if key not in own}
        try:
            return getattr(self.home, self.name, ABSENT)
        except Exception:  # a cell that is not filled, a class that answers by itself
            return ABSENT

    def changed(self) -> bool:
        """Return whether the value changed."""
        now = self.now()
        if now is self.value and is_plain(now):
            return False
        if self.name == WHOLE:
            return bool(fingerprint(now)[1] != self._before[1])
        return bool(fingerprint(now) != self._before)

    def filled(self) -> bool:
        """Return whether nothing changed but that tensors were added to a table: a program computes them itself."""
        return _filled(self._before, self.now())


def _filled(before: Any, now: Any) -> bool:
    after = fingerprint(now)
    if after == before:
        return True
    if type(now) is not dict or not isinstance(before, tuple) or before[0] != after[0]:
        return False
    values, known = list(now.values()), before[1]
    if not isinstance(known, list) or len(known) > len(values):
        return False
    held = zip(known, after[1], values, strict=False)
    return all(key == other and _filled(part, value) for (key, part), (other, _), value in held) and all(
        isinstance(value, torch.Tensor) for value in values[len(known) :]
    )


class Surroundings:
    """What was reached so far.  found: readings by home and name; objects: by identity, each with its place.

    `reach` may be called again for what turns up later.  It does not enter functions and objects of installed
    libraries.  O(code and objects reached).
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Reading] = {}
        self.objects: dict[int, tuple[Any, str]] = {}
        self._seen: dict[int, Any] = {}  # an id is of one object as long as that is kept

    def reach(self, thing: Any, place: str = "", depth: int = _DEPTH) -> None:
        """Walk on from a value, and note what it mentions."""
        if is_plain(thing) and not isinstance(thing, type):
            return
        if id(thing) in self._seen or depth == 0:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            if not from_library(thing):
                self._members(thing)
        elif not isinstance(thing, types.ModuleType):
            self._object(thing, place, depth)

    def note(self, home: Any, name: str, place: str, owner: Any = None) -> None:
        """Note a name that is read, and walk on from its value."""
        key = (id(home), name)
        if key not in self.found:
            reading = self.found[key] = Reading(home, name, place, owner)
            self.reach(reading.value, place)

    def _object(self, thing: Any, place: str, depth: int) -> None:
        if isinstance(thing, nn.Module):
            held: Any = [(name, value) for name, value in vars(thing).items() if name not in MODULES_OWN]
            held += [(name, module) for name, module in thing._modules.items() if module is not None]
        else:
            held = parts(thing) or ()
        if is_followed(thing):
            self.objects.setdefault(id(thing), (thing, place))
            if from_library(type(thing)) and not isinstance(thing, nn.Module):
                held = ()
        for function in functions_of(thing):
            self.reach(function, place)
        self.reach(type(thing), place)
        for key, part in held:
            deeper = depth if isinstance(thing, nn.Module) and isinstance(part, nn.Module) else depth - 1
            name = key if isinstance(key, str) else repr(key)
            self.reach(part, f"{place}.{name}" if place else name, deeper)

    def _members(self, kind: type) -> None:
        """Walk through a class of the user's: its methods, and the members that they mention, inherited ones too."""
        bases = [base for base in kind.__mro__ if not from_library(base)]
        members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
        methods = [member for base in bases for member in vars(base).values() if isinstance(member, _METHODS)]
        mentioned = {word for method in methods for function in functions_of(method) for word in _words(function)}
        for name, member in members.items():
            if isinstance(member, _METHODS) or (name in mentioned and not name.startswith("__")):
                self.note(kind, name, f"{kind.__qualname__}.{name}")
        for method in methods:
            for function in functions_of(method):
                self.reach(function)

    def _function(self, function: types.FunctionType) -> None:
        if function.__code__.co_filename.startswith(LIBRARIES):
            return
        for inner in functions_of(function):
            self.reach(inner)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.note(function, name, f"{function.__qualname__}.{name}")
        names = _words(function)
        steps = (step for code in _codes(function.__code__) for step in dis.get_instructions(code))
        looked_up = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        for name in sorted(looked_up & function.__globals__.keys()):
            if not name.startswith("__"):
                self._mentioned(function.__globals__, name, f"{function.__module__}.{name}", names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self.note(cell, "cell_contents", f"{function.__qualname__}: {name}")

    def _mentioned(self, home: Any, name: str, place: str, names: set[str]) -> None:
        """Note a name of a module or class, and the names mentioned with it that its value has as attributes."""
        value = home.get(name, ABSENT) if isinstance(home, dict) else getattr(home, name, ABSENT)
        self.note(home, name, place)
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if file is None or file.startswith(LIBRARIES):
                return
        elif not isinstance(value, type) or from_library(value):
            return
        for inner in sorted(names & vars(value).keys()):
            if (id(value), inner) not in self.found and not inner.startswith("__"):
                self._mentioned(value, inner, f"{place}.{inner}", names)


def functions_of(thing: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions behind a function, method, partial, property or decorated function."""
    found = [thing]
    if isinstance(thing, (types.MethodType, staticmethod, classmethod)):
        found.append(thing.__func__)
    elif isinstance(thing, (functools.partial, functools.cached_property)):
        found.append(thing.func)
    elif isinstance(thing, property):
        found += [thing.fget]
    held = attributes_of(thing)
    if isinstance(held, dict) and callable(thing) and not isinstance(thing, nn.Module):
        found.append(held.get("__wrapped__"))
    yield from (inner for inner in found if isinstance(inner, types.FunctionType))


def mentions(readings: Iterable[Reading], word: str) -> bool:
    """Return whether a function among the readings mentions a name."""
    read = [reading.value for reading in readings if reading.name == "__code__"]
    return any(word in code.co_names for outer in read for code in _codes(outer))


def _words(function: types.FunctionType) -> set[str]:
    """Return the names that a function mentions: globals and attributes."""
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
