"""What forward() read is compared before every step: each way to change it is seen, and what is the same is not."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.models import settings
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.capture.python.watch.changes import ModelWatch
from autopart.capture.python.watch.closure_reads import Surroundings
from autopart.capture.python.watch.fingerprint import fingerprint
from autopart.capture.python.watch.observed import Observed
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Size

CONFIG = {"alpha": 0.5}


class Settings:
    beta = 0.5


class Schedule:
    """Called, and holds a number."""

    __slots__ = ("level",)

    def __init__(self, level: float) -> None:
        self.level = level

    def __call__(self) -> float:
        return self.level


class Model(nn.Module):
    kinds: tuple[float, ...] = (1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.empty = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()
        self.pair = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.scalar = nn.Parameter(torch.ones(1))
        self.config = types.SimpleNamespace(depth={"a": [1.0, {"b": 2.0}]}, same=3)
        self.schedule = Schedule(0.5)
        self.array = numpy.ones(3)
        self.flag = True
        level = 0.5
        self.closure: Callable[[], float] = lambda: level
        self.scaled = types.MethodType(_scaled, self.schedule)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.pair(self.first(x)))

    @classmethod
    def kind(cls) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.config.depth["a"][1]["b"] * self.schedule() * float(self.array[0]) * self.closure() * self.kind()
        factor *= CONFIG["alpha"] * Settings.beta * settings.gamma * self.kinds[0] * self.scaled() * (2 - self.flag)
        bonus = getattr(self, "bonus", None)
        return self.run(x).square().mean() * factor + (0.0 if bonus is None else bonus)


def _scaled(schedule: Schedule) -> float:
    return schedule.level


def _cell(model: Any) -> None:
    model.closure.__closure__[0].cell_contents = 0.25


def _turn(model: Any) -> None:
    model.pair._modules["0"] = model.pair._modules.pop("0")


def _swap(model: Any) -> None:
    model.first.weight, model.second.weight = model.second.weight, model.first.weight


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "deep in a configuration": (lambda m: m.config.depth["a"][1].update(b=3.0), "config"),
    "an object with slots that is called": (lambda m: setattr(m.schedule, "level", 0.7), "schedule"),
    "an array in place": (lambda m: m.array.fill(2), "array"),
    "a variable of a closure": (_cell, "level"),
    "a global dictionary": (lambda m: CONFIG.update(alpha=0.25), "CONFIG"),
    "an attribute of a class": (lambda m: setattr(Settings, "beta", 0.25), "Settings.beta"),
    "a variable of a module": (lambda m: setattr(settings, "gamma", 0.25), "settings.gamma"),
    "an attribute that hides the class's": (lambda m: setattr(m, "kinds", (3.0,)), "kinds"),
    "the class's own": (lambda m: setattr(Model, "kinds", (4.0, 2.0)), "kinds"),
    "a method of the object": (lambda m: setattr(m, "run", lambda x: m.first(x)), "run"),
    "a method of the class": (lambda m: setattr(Model, "run", lambda self, x: self.first(x)), "Model.run"),
    "a class method": (lambda m: setattr(Model, "kind", classmethod(lambda cls: 2.0)), "Model.kind"),
    "True becomes 1": (lambda m: setattr(m, "flag", 1), "flag"),
    "an attribute that was absent": (lambda m: setattr(m, "bonus", 1.0), "bonus"),
    "a module that was absent": (lambda m: setattr(m, "bonus", nn.Identity()), "bonus"),
    "a module in an empty one": (lambda m: m.empty.add_module("inner", nn.Identity()), "empty.inner"),
    "the order of modules": (_turn, "the order in pair is 1, 0"),
    "frozen": (lambda m: m.first.bias.requires_grad_(False), "first.bias.requires_grad"),
    "forward of the class": (lambda m: setattr(Model, "forward", lambda self, x: self.run(x).sum()), "Model.forward"),
    "forward of a module": (lambda m: setattr(m.first, "forward", lambda x: x), "first.forward"),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "two parameters change places": (_swap, "first.weight was replaced"),
    "a parameter with one element": (
        lambda m: setattr(m, "scalar", nn.Parameter(m.scalar.detach().clone())), "scalar was replaced"
    ),
    "a parameter that was absent": (lambda m: setattr(m, "bonus", nn.Parameter(torch.ones(()))), "bonus was added"),
    "a buffer in an empty module": (
        lambda m: m.empty.register_buffer("table", torch.ones(3)), "empty.table was added"
    ),
    "a parameter becomes None": (lambda m: setattr(m.first, "bias", None), "first.bias was removed"),
    "a hook for all modules": (
        lambda m: nn.modules.module.register_module_forward_hook(lambda module, given, result: result), "forward hook"
    ),
}  # fmt: skip
SAME: dict[str, Callable[[Any], Any]] = {
    "an equal number": lambda m: setattr(m.config, "same", int("3")),
    "an equal tuple": lambda m: setattr(m, "kinds", tuple([1.0, 2.0])),
    "what nobody read": lambda m: setattr(m, "unread", random.random()),
    "an order that nobody reads": lambda m: m._modules.update(first=m._modules.pop("first")),
    "values in place": lambda m: m.first.weight.data.mul_(2),
}


@pytest.fixture
def watched():
    model = Model()
    saved = [(home, dict(vars(home))) for home in (Model, Settings, settings)]
    alpha = CONFIG["alpha"]
    captures = CaptureCache(model)
    captures(flatten(torch.ones(2, 4)), Size(2))
    assert captures.refresh(training=True) == []
    yield model, captures
    for home, before in saved:
        for name, value in before.items():
            if vars(home).get(name) is not value:
                setattr(home, name, value)
    CONFIG["alpha"] = alpha
    nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_named(watched, name):
    model, captures = watched
    change, words = CHANGES[name]
    change(model)
    assert any(words in told for told in captures.refresh(training=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_capture_can_follow_is_refused_by_name(watched, name):
    model, captures = watched
    change, words = REFUSED[name]
    change(model)
    with pytest.raises(RefusedError, match=words):
        captures.refresh(training=True)


@pytest.mark.parametrize("name", SAME)
def test_what_stays_the_same_is_not_captured_anew(watched, name):
    model, captures = watched
    SAME[name](model)
    assert captures.refresh(training=True) == []
    assert captures.refresh(training=True) == []


def alpha():
    """A function of this module that bears the name of an attribute."""


def test_an_attribute_is_not_taken_for_what_bears_its_name_in_the_module():
    def reads(model):
        return model.alpha, CONFIG

    around = Surroundings()
    around.reach(reads)
    names = {reading.place.rpartition(".")[2] for reading in around.found.values()}
    assert "CONFIG" in names and "alpha" not in names


def test_another_default_dtype_is_a_change() -> None:
    model = nn.Linear(3, 3)
    watch = ModelWatch(model, Observed(), {})
    assert watch.changes(training=True) == []
    torch.set_default_dtype(torch.float64)
    try:
        assert watch.changes(training=True) == ["the default dtype became torch.float64"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_captures_of_a_model_are_taken_up_again_when_it_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    captures = CaptureCache(model, lambda output, _: output.sum())
    batch, seen, versions = flatten((torch.ones(4, 3), None), with_target=True), dict[bool, str](), list[str]()
    for turn in range(12):
        frozen = turn % 2 == 0
        model[0].requires_grad_(not frozen).train(turn % 4 < 2)
        captures.refresh(training=True)
        captured = captures(batch, Size(2))
        assert seen.setdefault(frozen, captured.graph.shape_digest()) == captured.graph.shape_digest()
        versions.append(captures.version)
    assert len(set(seen.values())) == captures.made == 2
    assert versions[2:4] == versions[4:6]


def test_objects_that_all_know_each_other_are_compared_without_following_every_path() -> None:
    """There are 40 ** 6 paths of the depth that is compared, and a change is still seen wherever it is."""
    knots = [types.SimpleNamespace(number=number) for number in range(40)]
    for knot in knots:
        knot.others = list(knots)
    before = fingerprint(knots[0])
    assert fingerprint(knots[0]) == before
    for changed in (knots[0], knots[20], knots[39]):
        changed.number += 100
        assert fingerprint(knots[0]) != before
        changed.number -= 100
    assert fingerprint(knots[0]) == before


def test_an_object_that_was_met_at_the_last_depth_is_still_compared_where_it_is_nearer() -> None:
    inner = types.SimpleNamespace(deep=types.SimpleNamespace(deeper=[1]))
    far: Any = inner
    for _ in range(4):
        far = [far]
    before = fingerprint([far, inner])
    inner.deep.deeper.append(2)
    assert fingerprint([far, inner]) != before
