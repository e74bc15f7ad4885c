"""Each sample once an epoch, and the losses of plain training, however a run is cut and whatever reads ahead."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import autopart
from autopart.extras.sampler.sampler import Order
from autopart.ir.errors import UsageError
from autopart.session.ranks.listener import Listener

SEED = 5


class Refusing(Listener):
    """Refuses every step."""

    def before_call(self, name: str) -> BaseException | None:
        return UsageError("not now") if name == "step" else None


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are made of their own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64) * (number + 1) / self.size
        return torch.cat([torch.tensor([float(number)], dtype=torch.float64), x]), x.cos()[:2]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def driving(parameters: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(list(parameters), lr=0.02, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


@dataclass(frozen=True)
class Drawn:
    """One way to train.  loader: "plain" or "stateful".  stops: steps after which the run is cut, by a kill or by
    leaving the loop, in turn of `kills`.  plans: from each stop on.  left_out, retried: batches whose step is refused;
    the loop goes on with the next one, or tries again.  lost: steps after the last save when a run is killed.

    A loop of another library has its place here: a loader and a way to train of its own."""

    size: int
    rows: int
    epochs: int
    loader: str
    workers: int
    persistent: bool
    stops: tuple[int, ...]
    kills: tuple[bool, ...]
    plans: tuple[dict[str, Any], ...]
    left_out: frozenset[int]
    retried: frozenset[int]
    drop_last: bool
    lost: int

    @classmethod
    def of(cls, draw: random.Random, plans: list[dict[str, Any]]) -> Drawn:
        size, rows, epochs = draw.randint(6, 15), draw.randint(2, 5), draw.randint(2, 3)
        drop_last = draw.random() < 0.3
        steps = epochs * (size // rows if drop_last else -(-size // rows))
        stops = tuple(sorted(draw.sample(range(1, steps), min(steps - 1, draw.randint(1, 3)))))
        workers = draw.choice([0, 0, 1, 2])
        synced = all(plan.get("schedule") != "pipedream" for plan in plans)
        marks = [draw.random() for _ in range(steps)] if synced else []
        return cls(
            size, rows, epochs, draw.choice(["plain", "plain", "stateful"]), workers,
            bool(workers) and draw.random() < 0.4, stops, tuple(draw.random() < 0.6 for _ in stops),
            tuple(draw.choice(plans) for _ in range(len(stops) + 1)),
            frozenset(n for n, mark in enumerate(marks) if mark < 0.1),
            frozenset(n for n, mark in enumerate(marks) if mark > 0.9), drop_last, draw.randint(0, 2),
        )  # fmt: skip

    def expected(self) -> Progress:
        """Train in one process without an interruption."""
        model, dataset, found = net(), Numbered(self.size), Progress()
        optimizer, scheduler = driving(model.parameters())
        for number, batch in enumerate(self._batches()):
            found.given += 1
            if number in self.left_out:
                continue
            found.seen[number] = batch
            x, y = map(torch.stack, zip(*(dataset[each] for each in batch), strict=True))
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            found.losses[number] = loss.item()
        found.state = dict(model.state_dict())
        return found

    def _batches(self) -> Iterator[tuple[int, ...]]:
        for epoch in range(self.epochs):
            order = Order(self.size, SEED, True).of(epoch).tolist()
            for first in range(0, self.size - (self.rows - 1 if self.drop_last else 0), self.rows):
                yield tuple(order[first : first + self.rows])

    def loader_of(self, pipe: Any) -> Any:
        kind = DataLoader
        if self.loader == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader as kind
        dataset = Numbered(self.size)
        sampler = pipe.sampler(dataset, rows=self.rows, seed=SEED, drop_last=self.drop_last)
        return kind(
            dataset, batch_sampler=sampler, num_workers=self.workers, persistent_workers=self.persistent,
            multiprocessing_context="fork" if self.workers else None,
        )  # fmt: skip


@dataclass
class Progress:
    """What a run has done so far, as far as it was saved.  given: batches.  losses: by number of the batch."""

    part: int = 0
    given: int = 0
    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    state: dict[str, torch.Tensor] | None = None


def trained_part(drawn: Drawn, folder: Path, cluster: str, before: Progress) -> Progress:
    """Make a pipe, load what is there, and train until the next kill or the end.  A loop is left at each stop, and
    entered again if that is no kill; before a kill some more steps are made, which are lost."""
    torch.set_num_threads(1)
    sample = tuple(torch.zeros(drawn.rows, n, dtype=torch.float64) for n in (5, 2))
    options = {"costs": "analytic", "loss_fn": functional.mse_loss, "micro_batches": 1, "recompute": "off"}
    with autopart.compile(net(), cluster, sample=sample, **options | drawn.plans[before.part]) as pipe:
        optimizer, scheduler = driving(pipe.parameters())
        pipe.load(folder, optimizer, scheduler, missing_ok=True)
        loader, now = drawn.loader_of(pipe), copy.deepcopy(before)
        while now.part < len(drawn.stops):
            _train(drawn, pipe, loader, optimizer, scheduler, now, drawn.stops[now.part])
            now.part += 1
            pipe.save(folder, optimizer, scheduler)
            if drawn.kills[now.part - 1]:
                _train(drawn, pipe, loader, optimizer, scheduler, copy.deepcopy(now), now.given + drawn.lost)
                return now
        _train(drawn, pipe, loader, optimizer, scheduler, now, None)
        now.state = dict(pipe.state_dict())
        return now


def _train(
    drawn: Drawn, pipe: Any, loader: Any, optimizer: Any, scheduler: Any, now: Progress, stop: int | None
) -> None:
    """Train until so many batches were given; None for the end of the epochs."""
    if stop is not None and now.given >= stop:
        return
    if pipe.plan.schedule == "pipedream":
        _streamed(drawn, pipe, loader, optimizer, scheduler, now, stop)
        return
    while loader.batch_sampler.epoch < drawn.epochs:
        for x, y in loader:
            number, batch = now.given, (x, y)
            now.given += 1
            if number in drawn.left_out | drawn.retried:
                pipe.session.calls.listeners.append(refusing := Refusing())
                with suppress(UsageError):
                    pipe.step(batch)
                pipe.session.calls.listeners.remove(refusing)
            if number not in drawn.left_out:
                optimizer.zero_grad()
                now.losses[number] = pipe.step(batch).item()
                now.seen[number] = tuple(x[:, 0].int().tolist())
                optimizer.step()
                scheduler.step()
            if now.given == stop:
                return


def _streamed(
    drawn: Drawn, pipe: Any, loader: Any, optimizer: Any, scheduler: Any, now: Progress, stop: int | None
) -> None:
    first, before, taken = now.given, pipe.steps, list[tuple[int, ...]]()

    def batches() -> Iterator[Any]:
        while loader.batch_sampler.epoch < drawn.epochs:
            for x, y in loader:
                taken.append(tuple(x[:, 0].int().tolist()))
                yield x, y

    training = pipe.train(batches(), optimizer=lambda _: optimizer, scheduler=lambda _: scheduler)
    for number, loss in enumerate(training, first):
        now.losses[number] = loss.item()
        if stop is not None and first + pipe.steps - before >= stop:
            training.close()
            break
    pipe.flush()
    now.given = first + pipe.steps - before
    now.seen |= {first + n: taken[n] for n in range(pipe.steps - before)}


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torchdata 0.11 with torch 2.13
]
ALONE = [{"schedule": "1f1b"}, {"schedule": "pipedream"}]
PAIRS = [
    {"stages": 2, "replicas": 1, "cuts": ("2",)},
    {"stages": 1, "replicas": 2},
    {"stages": 2, "replicas": 1, "cuts": ("2",), "schedule": "pipedream"},
]


def same(found: Progress, expected: Progress, drawn: Drawn, *, exact: bool) -> None:
    assert found.seen == expected.seen, drawn
    if not exact:  # batches in flight have older weights
        return
    for number, loss in found.losses.items():
        assert loss == pytest.approx(expected.losses[number], rel=1e-12), drawn
    assert found.state is not None and expected.state is not None
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 120), marks=pytest.mark.slow)])
def test_a_run_that_is_cut_anywhere_is_that_of_plain_training(tmp_path: Path, seeds: range) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    for seed in seeds:
        draw = random.Random(seed)
        drawn = Drawn.of(draw, [ALONE[1]] if seed % 4 == 0 else [ALONE[0]] if seed % 4 == 1 else ALONE)
        found = Progress()
        while found.state is None:
            found = trained_part(drawn, tmp_path / str(seed), "cpu:1", found)
        same(found, drawn.expected(), drawn, exact=True)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=pytest.mark.slow)])
def test_a_run_that_changes_plan_and_number_of_ranks_is_that_of_plain_training(
    pair, tmp_path: Path, seeds: range
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    for seed in seeds:
        draw = random.Random(seed)
        drawn = Drawn.of(draw, [*PAIRS, *ALONE])
        found = Progress()
        while found.state is None:
            job = trained_part, drawn, tmp_path / str(seed), "cpu:2", found
            alone = drawn.plans[found.part] in ALONE
            found = trained_part(*job[1:3], "cpu:1", found) if alone else pair.run(*job)[0]
        stale = PAIRS[2] in drawn.plans
        same(found, drawn.expected(), drawn, exact=not stale)
