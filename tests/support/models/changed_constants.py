"""Models and losses that read one Python value from some holder, and a way to change that value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.models.constant_values import Value

GLOBAL: Any = None


class Held:
    """An object with one value."""

    value: Any = None


class OfClass:
    value: Any = None


class Net(nn.Module):
    """A model that scales its loss by a factor it reads from some holder."""

    value: Any = None
    type: Any = None  # type: ignore[assignment]

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Own(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.value)


class OwnName(Net):
    """Reads an attribute whose name every module has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.type)


class OwnWhole(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(vars(self)["value"])


class Late(Net):
    """Reads a class attribute that is later hidden by an instance attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.value)


class Inside(Net):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__(read)
        self.config = Held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(self.config.value)


class Global(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(GLOBAL)


class ClassOther(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.read(OfClass.value)


class LossObject:
    """A loss function object with state."""

    def __init__(self, read: Callable[[Any], Any], value: Any) -> None:
        self.read, self.value = read, value

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.read(self.value)

    def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


class LossSlots:
    __slots__ = ("read", "value")

    def __init__(self, read: Callable[[Any], Any], value: Any) -> None:
        self.read, self.value = read, value

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.read(self.value)


def loss_with(read: Any, holder: Any, output: torch.Tensor, target: torch.Tensor, *, extra: Any = None) -> torch.Tensor:
    held = holder if extra is None else extra
    return F.mse_loss(output, target) * read(held["value"])


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


@dataclass
class Case:
    """model, loss: what to train; change: changes the value."""

    model: nn.Module
    loss: Any
    change: Callable[[], None]


def _setting(home: Any, value: Value) -> Callable[[], None]:
    def change() -> None:
        home.value = value.change(home.value)

    return change


def _set_global(value: Value) -> Callable[[], None]:
    def change() -> None:
        globals()["GLOBAL"] = value.change(GLOBAL)

    return change


def _of_model(kind: type[Net]) -> Callable[[Value], Case]:
    def make(value: Value) -> Case:
        model = kind(value.read)
        model.value = value.make()
        return Case(model, mse, _setting(model, value))

    return make


def _own_name(value: Value) -> Case:
    model = OwnName(value.read)
    model.type = value.make()  # type: ignore[assignment]
    return Case(model, mse, lambda: setattr(model, "type", value.change(model.type)))


def _late(value: Value) -> Case:
    kind = type("Late", (Late,), {"value": value.make()})
    model = kind(value.read)
    return Case(model, mse, _setting(model, value))


def _inside(value: Value) -> Case:
    model = Inside(value.read)
    model.config.value = value.make()
    return Case(model, mse, _setting(model.config, value))


def _global(value: Value) -> Case:
    globals()["GLOBAL"] = value.make()
    return Case(Global(value.read), mse, _set_global(value))


def _class(value: Value) -> Case:
    OfClass.value = value.make()
    return Case(ClassOther(value.read), mse, _setting(OfClass, value))


def _closure(value: Value) -> Case:
    held = value.make()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * value.read(held)

    def change() -> None:
        nonlocal held
        held = value.change(held)

    return Case(Net(value.read), loss, change)


def _default(value: Value) -> Case:
    def loss(output: torch.Tensor, target: torch.Tensor, held: Any = value.make()) -> torch.Tensor:  # noqa: B008
        return F.mse_loss(output, target) * value.read(held)

    def change() -> None:
        loss.__defaults__ = (value.change(loss.__defaults__[0]),)  # type: ignore[index]

    return Case(Net(value.read), loss, change)


def _loss(kind: Any, as_method: bool = False) -> Callable[[Value], Case]:
    def make(value: Value) -> Case:
        loss = kind(value.read, value.make())
        return Case(Net(value.read), loss.method if as_method else loss, _setting(loss, value))

    return make


def _partial(keyword: bool) -> Callable[[Value], Case]:
    def make(value: Value) -> Case:
        held = {"value": value.make()}
        given: Any = functools.partial(loss_with, value.read, {} if keyword else held)
        loss = functools.partial(given, extra=held) if keyword else given
        return Case(Net(value.read), loss, lambda: held.update(value=value.change(held["value"])))

    return make


HOLDERS: dict[str, Callable[[Value], Case]] = {
    "attribute": _of_model(Own),
    "vars of the module": _of_model(OwnWhole),
    "attribute of every module": _own_name,
    "hides a class attribute": _late,
    "object attribute": _inside,
    "global": _global,
    "class": _class,
    "closure": _closure,
    "default": _default,
    "object as loss": _loss(LossObject),
    "method as loss": _loss(LossObject, as_method=True),
    "slots as loss": _loss(LossSlots),
    "partial": _partial(keyword=False),
    "partial keyword": _partial(keyword=True),
}
