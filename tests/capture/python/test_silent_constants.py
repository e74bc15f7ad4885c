"""What Python reads while a model is traced, changed between two steps: the next program is the plain model's, or the
change is refused by name.  Never is it silent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.grids import sampled
from support.models.constant_values import VALUES, Value
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Size

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


# -- tests -----------------------------------------------------------------------------------------------------------


ROWS, TARGETS = torch.arange(8.0).sin().reshape(2, 4), torch.arange(8.0).cos().reshape(2, 4)
_TOLD = (
    "float with an attribute", "dict order", "__getattr__", "vars", "hides its class attribute", "AttrDict",
    "deep copy", "cached property", "bound method", "list of objects", "partial", "tensor of a different shape",
    "tensor becomes a float", "item() after a change of .data", "item() of a computed tensor", "torch's generator",
)  # fmt: skip
QUICK = [("attribute", value) for value in _TOLD] + [(holder, "float() of a tensor") for holder in HOLDERS]
GRID = [(holder, value) for holder in HOLDERS for value in VALUES if (holder, value) not in QUICK]


def check(holder: str, value: str) -> None:
    """Raises AssertionError where the program is not that of the plain model."""
    case = HOLDERS[holder](VALUES[value])
    cache = CaptureCache(case.model, case.loss)
    batch = flatten((ROWS, TARGETS), with_target=True)
    for _ in range(2):  # what stays the same is not captured again
        try:
            assert run(cache, batch) == pytest.approx(plain(case), rel=1e-5), "before the change"
        except AutopartError:
            return
        assert cache.refresh(training=True) == []
    before = plain(case)
    case.change()
    assert plain(case) != pytest.approx(before, rel=1e-5)
    try:
        cache.refresh(training=True)
        found = run(cache, batch)
    except AutopartError as error:
        assert error.fix
        return
    assert found == pytest.approx(plain(case), rel=1e-5), "silent"


def plain(case: Case) -> float:
    return case.loss(case.model(ROWS), TARGETS).item()


def run(cache: CaptureCache, batch: Any) -> float:
    captured = cache(batch, Size(2))
    names = captured.names
    given = {node: captured.tensors[name] for node, name in names.params.items()}
    given |= dict(zip(names.inputs, batch.tensors, strict=True))
    results = captured.module(*(given[node.name] for node in captured.module.graph.nodes if node.op == "placeholder"))
    return (results[0] if isinstance(results, tuple) else results).item()


@pytest.mark.parametrize(("holder", "value"), sampled(QUICK), ids=str)
def test_a_change_is_followed_or_refused(holder: str, value: str) -> None:
    check(holder, value)


@pytest.mark.slow
@pytest.mark.parametrize(("holder", "value"), GRID, ids=str)
def test_a_change_is_followed_or_refused_wherever_it_is_held(holder: str, value: str) -> None:
    check(holder, value)
