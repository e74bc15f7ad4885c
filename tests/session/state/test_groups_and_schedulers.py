"""Parameter groups, schedulers and optimizers of a checkpoint, found by the parameters in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import autopart
from autopart.ir.errors import CheckpointError, UsageError

Mark = int
"""What a group is about: groups of the same mark have the same options."""
Cut = list[tuple[Mark, tuple[str, ...]]]
"""Groups of one optimizer, in their order."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def each(values: dict[Mark, float], optimizer: Any) -> list[float]:
    return [values[group["mark"]] for group in optimizer.param_groups]


def sequential(optimizer: Any, values: dict[Mark, float]) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.5, total_iters=3), schedules.ExponentialLR(optimizer, 0.8)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any, values: dict[Mark, float]) -> Any:
    return schedules.ChainedScheduler([schedules.ConstantLR(optimizer, 0.5, 3), lambdas(optimizer, values)])


def lambdas(optimizer: Any, values: dict[Mark, float]) -> Any:
    paces = [lambda epoch, v=value: (1 - v / 100) ** epoch for value in each(values, optimizer)]
    return schedules.LambdaLR(optimizer, paces)


SCHEDULERS: dict[str, Callable[[Any, dict[Mark, float]], Any]] = {
    "lambda": lambdas,
    "multiplicative": lambda o, v: schedules.MultiplicativeLR(o, [lambda _, x=x: 1 - x / 100 for x in each(v, o)]),
    "step": lambda o, v: schedules.StepLR(o, 2, 0.5),
    "many": lambda o, v: schedules.MultiStepLR(o, [1, 5], 0.5),
    "cosine": lambda o, v: schedules.CosineAnnealingLR(o, 10),
    "restarts": lambda o, v: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "polynomial": lambda o, v: schedules.PolynomialLR(o, 10),
    "one cycle": lambda o, v: schedules.OneCycleLR(o, [x / 50 for x in each(v, o)], total_steps=20),
    "cyclic": lambda o, v: schedules.CyclicLR(o, [x / 900 for x in each(v, o)], [x / 90 for x in each(v, o)], 3),
    "plateau": lambda o, v: schedules.ReduceLROnPlateau(
        o, factor=0.5, patience=0, min_lr=[x / 200 for x in each(v, o)]
    ),
    "sequential": sequential,
    "chained": chained,
    "averages": lambda o, v: torch.optim.swa_utils.SWALR(o, [x / 300 for x in each(v, o)], 5),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.5, momentum=0.5),
}


class Run:
    """Training of a model in one process with some optimizers, each with a scheduler.

    factor: of every number that is saved for a group: a load has to replace it."""

    def __init__(self, kinds: list[str], cuts: list[Cut], paces: list[str], factor: float = 1.0) -> None:
        self.model, self.paces = net(), paces
        self.named = dict(self.model.named_parameters())
        numbers = {mark: factor * (mark + 1) for mark in range(9)}
        self.optimizers = [
            OPTIMIZERS[kind](
                [
                    {"params": [self.named[name] for name in names], "lr": numbers[mark] / 100, "mark": mark}
                    for mark, names in cut
                ]
            )
            for kind, cut in zip(kinds, cuts, strict=True)
        ]
        functions = {mark: float(mark + 1) for mark in range(9)}  # of a lambda, which no checkpoint has
        self.schedulers = [
            SCHEDULERS[pace](made, functions if pace in ("lambda", "multiplicative", "chained") else numbers)
            for pace, made in zip(paces, self.optimizers, strict=True)
        ]

    def given(self) -> tuple[Any, Any]:
        """What a call is given: lists, or the only one."""
        several = len(self.optimizers) > 1
        return (self.optimizers, self.schedulers) if several else (self.optimizers[0], self.schedulers[0])

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        self.model(x).square().mean().backward()
        for optimizer, scheduler, pace in zip(self.optimizers, self.schedulers, self.paces, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(1.0) if pace == "plateau" else scheduler.step()

    def state(self) -> dict[str, Any]:
        """Everything that a step depends on, by the names of the parameters."""
        found: dict[str, Any] = {}
        names = {id(p): name for name, p in self.named.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    options = {key: value for key, value in group.items() if key not in ("params", "mark")}
                    moments = {key: str(value.tolist()) for key, value in optimizer.state[parameter].items()}
                    found[name] = parameter.tolist(), options, moments
        return found


def drawn_cut(draw: random.Random, names: list[str], marks: list[Mark]) -> Cut:
    """Deal names to marks, each at least one."""
    homes = {name: draw.choice(marks) for name in names} | dict(zip(names, marks, strict=False))
    return [(mark, tuple(name for name in names if homes[name] == mark)) for mark in marks]


def changed(draw: random.Random, cut: Cut) -> Cut:
    """Other groups with the same parameters at each mark: split, and in another order."""
    found: Cut = []
    for mark, names in cut:
        own = draw.sample(names, len(names))
        place = draw.randrange(1, len(own)) if len(own) > 1 and draw.random() < 0.5 else len(own)
        found += [(mark, tuple(part)) for part in (own[:place], own[place:]) if part]
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("count", [130, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_parameter_goes_on_as_saved_in_whatever_group_it_is(tmp_path: Path, count: int) -> None:
    known = [pace for pace in SCHEDULERS if pace != "not of torch"]
    for seed in range(count):
        draw = random.Random(seed)
        names = draw.sample([name for name, _ in net().named_parameters()], 6)
        several = draw.choice([1, 1, 2, 3])
        kinds = [draw.choice(list(OPTIMIZERS)) for _ in range(several)]
        paces = [draw.choice(known) for _ in range(several)]
        if seed < len(known):
            paces[0] = known[seed]
        cuts = [
            drawn_cut(draw, names[n::several], [3 * n + k for k in range(draw.randint(1, 2))]) for n in range(several)
        ]
        first = Run(kinds, cuts, paces)
        for number in range(4):
            first.step(number)
        autopart.save_from(first.model, tmp_path / str(seed), *first.given())
        order = draw.sample(range(several), several)
        second = Run(*([each[n] for n in order] for each in (kinds, [changed(draw, c) for c in cuts], paces)), 7.0)
        autopart.load_into(second.model, tmp_path / str(seed), *second.given())
        for number in range(4, 8):
            assert second.state() == first.state(), (seed, kinds, cuts, paces, order)
            first.step(number)
            second.step(number)
        assert second.state() == first.state(), (seed, kinds, cuts, paces, order)


class Paced:
    """A scheduler that is not of torch: it keeps something for each group, under a name of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.speeds = optimizer, each({mark: float(mark + 1) for mark in range(9)}, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"speeds": self.speeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.speeds = state["speeds"]

    def step(self) -> None:
        for group, speed in zip(self.optimizer.param_groups, self.speeds, strict=True):
            group["lr"] *= 1 - speed / 100


SCHEDULERS["not of torch"] = lambda o, v: Paced(o)
ALL = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
SAVED: Cut = [(0, ALL[:2]), (1, ALL[2:])]
TURNED: Cut = [SAVED[1], SAVED[0]]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (("sgd", SAVED, "step"), ("sgd", [(0, ALL)], "step"), r"group 0 joins parameters of groups \[0, 1\]"),
        (("sgd", SAVED, "step"), ("sgd", SAVED, "cosine"), "no state for the CosineAnnealingLR"),
        (("sgd", SAVED, "chained"), ("sgd", SAVED, "sequential"), "no state for the SequentialLR"),
        (("sgd", SAVED, "not of torch"), ("sgd", TURNED, "not of torch"), "no state for the Paced and its parameter"),
        (("sgd", [(0, ALL[:4])], "step"), ("sgd", [(0, ALL[:4]), (1, ALL[4:])], "step"), "no state for the StepLR"),
        (("sgd", SAVED, "step"), ("adamw", SAVED, "step"), "the state of SGD, and the optimizer is AdamW"),
    ],
)
def test_what_cannot_be_matched_is_refused_and_nothing_changes_and_the_advice_works(
    tmp_path: Path, before: Any, after: Any, says: str
) -> None:
    first, second = (Run([kind], [cut], [pace]) for kind, cut, pace in (before, after))
    first.step(0)
    autopart.save_from(first.model, tmp_path, *first.given())
    known = second.state(), str(second.schedulers[0].state_dict())
    with pytest.raises(CheckpointError, match=says) as caught:
        autopart.load_into(second.model, tmp_path, *second.given())
    assert (second.state(), str(second.schedulers[0].state_dict())) == known
    if "make groups and schedulers as in the run" in str(caught.value) and before[0] == after[0]:
        with_scheduler = Run([before[0]], [before[1]], [before[2]])
        autopart.load_into(with_scheduler.model, tmp_path, *with_scheduler.given())
        assert with_scheduler.state() == first.state()
    if "load without scheduler=" in str(caught.value):
        autopart.load_into(second.model, tmp_path, second.given()[0])
        for name in {name for _, names in before[1] for name in names}:
            assert second.state()[name][0] == first.state()[name][0], name


def test_a_scheduler_alone_is_loaded_where_it_has_one_group(tmp_path: Path) -> None:
    for cut in ([(0, ALL)], SAVED):
        first, second = Run(["sgd"], [cut], ["step"]), Run(["adamw"], [cut], ["step"])
        first.step(0)
        autopart.save_from(first.model, tmp_path / str(len(cut)), *first.given())
        if len(cut) > 1:
            with pytest.raises(CheckpointError, match="without optimizer= there may be one group"):
                autopart.load_into(second.model, tmp_path / str(len(cut)), scheduler=second.schedulers[0])
            continue
        autopart.load_into(second.model, tmp_path / str(len(cut)), scheduler=second.schedulers[0])
        assert second.schedulers[0].state_dict() == first.schedulers[0].state_dict()


def test_what_is_no_optimizer_or_scheduler_is_named(tmp_path: Path) -> None:
    run = Run(["sgd", "adamw"], [[SAVED[0]], [SAVED[1]]], ["step", "step"])
    for given, says in (
        ((dict(enumerate(run.optimizers)),), "the optimizer is a dict"),
        (("adamw",), "the optimizer is a str"),
        ((run.schedulers[0],), "the optimizer is a StepLR"),
        ((run.optimizers, {"note": 1}), "the scheduler is a dict"),
    ):
        with pytest.raises(UsageError, match=says):
            autopart.save_from(run.model, tmp_path, *given)
        with pytest.raises(UsageError, match=says):
            autopart.load_into(run.model, tmp_path, *given)
    both = torch.optim.SGD([run.named["0.bias"]])
    with pytest.raises(CheckpointError, match=r"0\.bias is updated by two optimizers"):
        autopart.save_from(run.model, tmp_path, [*run.optimizers, both])
    assert not (tmp_path / "latest").exists()


def test_tensors_in_extra_are_kept_as_numbers_or_refused_with_a_form_that_is_kept(tmp_path: Path) -> None:
    table = torch.arange(4.0).reshape(2, 2)
    with pytest.raises(CheckpointError, match=r"extra\.table cannot be saved.*\n.*\n.*tensor\.tolist\(\)"):
        autopart.save_from(net(), tmp_path, extra={"table": table})
    autopart.save_from(net(), tmp_path, extra={"table": table.tolist(), "loss": torch.tensor(1.5)})
    found = autopart.load_into(net(), tmp_path)
    assert torch.equal(torch.tensor(found["table"]), table) and torch.equal(found["loss"], torch.tensor(1.5))
