"""Python values of every kind from which a model may read a number, and a way to change each."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch


class Quiet(float):
    """A float whose repr never changes."""

    def __repr__(self) -> str:
        return "a number"

    __str__ = __repr__


class Word(str):
    def __repr__(self) -> str:
        return "a word"


class Scaled(float):
    """A float with an attribute."""

    by = 1.0


def scaled(by: float) -> Scaled:
    found = Scaled(2.0)
    found.by = by
    return found


@dataclass(frozen=True)
class Value:
    """A Python value of a test.

    make: returns the value; read: returns the factor it stands for; change: returns another value, or the same one
    changed in place.
    """

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], Any]


def inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that changes a value in place and returns it."""

    def changed(value: Any) -> Any:
        change(value)
        return value

    return changed


def number(value: Any) -> Any:
    return value


class Deep:
    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(levels=[{"alpha": 0.5}])


class Slotted:
    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 0.5


class Proper:
    """An object with a property."""

    def __init__(self) -> None:
        self._alpha = 0.5

    @property
    def alpha(self) -> float:
        return self._alpha


class Dynamic:
    """An object with __getattr__."""

    def __init__(self) -> None:
        self.table = {"alpha": 0.5}

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(name) from None


class Through:
    """An object that reads its attribute from vars()."""

    def __init__(self) -> None:
        self.alpha = 0.5

    def read(self) -> float:
        return vars(self)["alpha"]


class AttrDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Computed:
    def __init__(self) -> None:
        self.base = 0.5

    @functools.cached_property
    def alpha(self) -> float:
        return self.base


class Described:
    alpha = 0.5


class Called:
    def __init__(self) -> None:
        self.level = 0.5

    def __call__(self) -> float:
        return self.level

    def method(self) -> float:
        return self.level


def closed() -> Callable[..., float]:
    level = 0.5

    def read(default: float = 1.0, *, named: float = 1.0) -> float:
        return level * default * named

    return read


def first_item(value: Any) -> float:
    """Return the first value of a dictionary."""
    return next(iter(value.values()))


def _turned(value: dict[str, float]) -> None:
    value["a"] = value.pop("a")


def _reset(value: Computed) -> None:
    value.base = 0.25
    del value.__dict__["alpha"]


def _cell(function: Any) -> None:
    function.__closure__[0].cell_contents = 0.25


def _attribute(name: str, to: Any) -> Callable[[Any], Any]:
    return inside(lambda value: setattr(value, name, to))


def other_code() -> types.CodeType:
    level = 0.0

    def read(default: float = 1.0, *, named: float = 1.0) -> float:
        return level + default + named

    return read.__code__


def scalar() -> torch.Tensor:
    return torch.tensor(0.5)


VALUES: dict[str, Value] = {
    "float": Value(lambda: 0.5, number, lambda _: 0.25),
    "negative zero": Value(lambda: 0.0, lambda v: 2.0 if str(v) == "0.0" else 3.0, lambda _: -0.0),
    "int to bool": Value(lambda: 1, lambda v: 2.0 if v is True else 3.0, lambda _: True),
    "text": Value(lambda: "mean", lambda v: len(v), lambda _: "some"[:3]),
    "None": Value(lambda: None, lambda v: 1.0 if v is None else v, lambda _: 0.25),
    "float subclass": Value(lambda: Quiet(0.5), float, lambda _: Quiet(0.25)),
    "str subclass": Value(lambda: Word("ab"), len, lambda _: Word("abc")),
    "float with an attribute": Value(lambda: scaled(0.5), lambda v: v * v.by, lambda _: scaled(0.25)),
    "dtype": Value(lambda: torch.float32, lambda v: torch.finfo(v).bits / 32, lambda _: torch.float64),
    "tuple": Value(lambda: (0.5, (1.0, 2.0)), lambda v: v[1][0], lambda _: (0.5, (3.0, 2.0))),
    "list in place": Value(lambda: [0.5], lambda v: v[0], inside(lambda v: v.__setitem__(0, 0.25))),
    "nested dict": Value(
        lambda: {"a": [{"b": 0.5}]}, lambda v: v["a"][0]["b"], inside(lambda v: v["a"][0].update(b=0.25))
    ),
    "dict order": Value(lambda: {"a": 0.5, "b": 0.25}, first_item, inside(_turned)),
    "ordered dict": Value(lambda: OrderedDict(a=0.5, b=0.25), first_item, inside(lambda v: v.move_to_end("a"))),
    "deque": Value(lambda: deque([0.5, 0.25]), lambda v: v[0], inside(lambda v: v.rotate(1))),
    "set": Value(lambda: {1, 2}, lambda v: float(max(v)), inside(lambda v: v.add(3))),
    "empty list": Value(lambda: [], lambda v: 1.0 + len(v), inside(lambda v: v.append(1))),
    "namespace": Value(lambda: types.SimpleNamespace(alpha=0.5), lambda v: v.alpha, _attribute("alpha", 0.25)),
    "deep": Value(Deep, lambda v: v.inner.levels[0]["alpha"], inside(lambda v: v.inner.levels[0].update(alpha=0.25))),
    "nested object replaced": Value(
        Deep,
        lambda v: v.inner.levels[0]["alpha"],
        inside(lambda v: setattr(v, "inner", types.SimpleNamespace(levels=[{"alpha": 0.25}]))),
    ),
    "slots": Value(Slotted, lambda v: v.alpha, _attribute("alpha", 0.25)),
    "property": Value(Proper, lambda v: v.alpha, _attribute("_alpha", 0.25)),
    "__getattr__": Value(Dynamic, lambda v: v.alpha, inside(lambda v: v.table.update(alpha=0.25))),
    "vars": Value(Through, lambda v: v.read(), _attribute("alpha", 0.25)),
    "getattr with default": Value(Called, lambda v: getattr(v, "late", 0.5), _attribute("late", 0.25)),
    "hasattr": Value(Called, lambda v: 0.5 if hasattr(v, "late") else 1.0, _attribute("late", None)),
    "hides its class attribute": Value(Described, lambda v: v.alpha, _attribute("alpha", 0.25)),
    "AttrDict": Value(lambda: AttrDict(alpha=0.5), lambda v: v.alpha, inside(lambda v: v.update(alpha=0.25))),
    "copied": Value(Proper, lambda v: copy.copy(v).alpha, _attribute("_alpha", 0.25)),
    "deep copy": Value(
        Deep,
        lambda v: copy.deepcopy(v).inner.levels[0]["alpha"],
        inside(lambda v: v.inner.levels[0].update(alpha=0.25)),
    ),
    "cached property": Value(Computed, lambda v: v.alpha, inside(_reset)),
    "called": Value(Called, lambda v: v(), _attribute("level", 0.25)),
    "bound method": Value(lambda: Called().method, lambda v: v(), inside(lambda v: setattr(v.__self__, "level", 0.25))),
    "list of objects": Value(lambda: [Called()], lambda v: v[0](), inside(lambda v: setattr(v[0], "level", 0.25))),
    "closure": Value(closed, lambda v: v(), inside(_cell)),
    "defaults": Value(closed, lambda v: v(), _attribute("__defaults__", (0.25,))),
    "keyword defaults": Value(closed, lambda v: v(), inside(lambda v: v.__kwdefaults__.update(named=0.25))),
    "code": Value(closed, lambda v: v(), _attribute("__code__", other_code())),
    "partial": Value(
        lambda: functools.partial(number, {"alpha": 0.5}),
        lambda v: v()["alpha"],
        inside(lambda v: v.args[0].update(alpha=0.25)),
    ),
    "partial's keywords": Value(
        lambda: functools.partial(closed(), named=0.5), lambda v: v(), inside(lambda v: v.keywords.update(named=0.25))
    ),
    "array in place": Value(lambda: numpy.ones(2), lambda v: float(v[0]), inside(lambda v: v.fill(2))),
    "tensor replaced": Value(scalar, number, lambda _: torch.tensor(0.25)),
    "tensor of a different shape": Value(scalar, lambda v: v.sum(), lambda _: torch.tensor([0.25, 1.0])),
    "tensor filled": Value(scalar, number, inside(lambda v: v.fill_(0.25))),
    "tensor becomes a float": Value(scalar, number, lambda _: 0.25),
    "tensor in a list": Value(
        lambda: [scalar()], lambda v: v[0], inside(lambda v: v.__setitem__(0, torch.tensor(0.25)))
    ),
    "float() of a tensor": Value(scalar, float, inside(lambda v: v.fill_(0.25))),
    "item() of a tensor": Value(scalar, lambda v: v.item(), inside(lambda v: v.fill_(0.25))),
    "item() after a change of .data": Value(scalar, lambda v: v.item(), inside(lambda v: v.data.fill_(0.25))),
    "tolist() of a tensor": Value(lambda: torch.ones(3), lambda v: v.tolist()[1], inside(lambda v: v.mul_(2))),
    "branch on a tensor": Value(scalar, lambda v: 1.0 if v > 0.4 else 2.0, inside(lambda v: v.fill_(0.25))),
    "item() of a computed tensor": Value(scalar, lambda v: (v * 2).item(), inside(lambda v: v.fill_(0.25))),
    "float() of an element": Value(lambda: torch.ones(3), lambda v: float(v[1]), inside(lambda v: v.mul_(2))),
    "numpy() of a tensor": Value(lambda: torch.ones(3), lambda v: float(v.numpy()[1]), inside(lambda v: v.mul_(2))),
    "generator": Value(lambda: random.Random(0), lambda v: copy.deepcopy(v).random(), inside(lambda v: v.seed(7))),
    "torch's generator": Value(
        lambda: torch.Generator().manual_seed(3), lambda v: v.initial_seed() / 10, inside(lambda v: v.manual_seed(7))
    ),
}
