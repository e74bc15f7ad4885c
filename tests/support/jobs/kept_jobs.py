"""Jobs that keep the activations of frozen layers by sample, and their oracle, the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.extras.freezing import replan as replanning
from autopart.extras.freezing.kept.activations import Counts, activations_of
from support.jobs.freeze_jobs import Net, first, freeze
from support.jobs.replan_jobs import WIDTH
from support.jobs.step_jobs import refusal_of

ROWS, SAMPLES = 8, 24
ROOM = autopart.freeze.AutoCache(1 << 20, samples=SAMPLES)
Frozen = Sequence[tuple[str, ...]]


def data(epoch: int, place: int) -> tuple[torch.Tensor, list[int]]:
    """Return rows of a data set in an order of the epoch, and the numbers of their samples."""
    rows = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    own = order[place * ROWS : (place + 1) * ROWS]
    return rows[own], own.tolist()


def net() -> Net:
    return Net()


def alone(frozen: Frozen, make: Callable[[], nn.Module] = net) -> Trained:
    """Train in one process.  frozen: modules, by epoch."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = Trained()
    for epoch, names in enumerate(frozen):
        freeze(model, names)
        for place in range(SAMPLES // ROWS):
            loss = model(data(epoch, place)[0])
            loss.backward()
            found.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.evaluated.append(evaluated(model))
    found.state = dict(model.state_dict())
    return found


def evaluated(model: nn.Module) -> float:
    """Return the loss of one batch in eval mode."""
    model.eval()
    with torch.no_grad():
        loss = float(model(data(0, 0)[0]))
    model.train()
    return loss


@dataclass
class Trained:
    """Losses and state; after each epoch, how many rows were read and computed, what is kept, and the plan."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    used: list[tuple[int, int]] = field(default_factory=list)
    plans: list[autopart.Plan] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)

    @property
    def starts(self) -> list[str]:
        """The first op of each epoch's plan."""
        return [plan.decision.stages[0].ops[0] for plan in self.plans]


def trained(
    frozen: Frozen,
    options: dict[str, Any],
    cache: autopart.freeze.AutoCache = ROOM,
    make: Callable[[], nn.Module] = net,
    ranks: int = 2,
    sharded: bool = False,
    named: bool = True,
) -> Trained:
    """Train, planning anew before every epoch; each plan behind frozen layers is taken, however long its step.

    named: whether the samples are named."""
    found = Trained()
    common: dict[str, Any] = {"sample": data(0, 0)[0], "costs": "analytic", "cache": False}
    with pytest.MonkeyPatch.context() as patch, autopart.compile(make(), f"cpu:{ranks}", **common, **options) as pipe:
        patch.setattr(replanning, "_pays", lambda *_: True)
        patch.setattr(replanning, "WORTH", -1e9)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for epoch, names in enumerate(frozen):
            freeze(pipe.model, names)
            pipe.replan(optimizer, cache=cache)
            for place in range(SAMPLES // ROWS):
                rows, numbers = data(epoch, place)
                if sharded:
                    own = list(pipe.data_rows(ROWS))
                    rows, numbers = rows[own], [numbers[row] for row in own]
                given, known = (rows, numbers) if pipe.needs_data else (None, None)
                loss = pipe.step(given, sharded=sharded, samples=known if named else None)
                found.losses.append(loss.item())
                optimizer.step()
                pipe.zero_grad()
            activations = activations_of(pipe.session)
            found.counts.append(replace(activations.counts))
            found.used.append(activations.used_bytes)
            found.plans.append(pipe.plan)
            found.evaluated.append(pipe.eval_loss(data(0, 0)[0]).item())
        found.state = pipe.state_dict()
    return found


@contextmanager
def begun(
    names: tuple[str, ...], cache: autopart.freeze.AutoCache = ROOM, make: Callable[[], nn.Module] = net
) -> Iterator[autopart.Pipe]:
    """Yield a pipe on one rank whose plan begins behind these layers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        autopart.compile(make(), "cpu:1", sample=data(0, 0)[0], costs="analytic", cache=False, micro_batches=1) as pipe,
    ):
        patch.setattr(replanning, "_pays", lambda *_: True)
        patch.setattr(replanning, "WORTH", -1e9)
        freeze(pipe.model, names)
        pipe.replan(cache=cache)
        yield pipe


def replanned(names: tuple[str, ...], make: Callable[[], nn.Module]) -> None:
    with begun(names, ROOM, make):
        pass


def augmented(cache: autopart.freeze.AutoCache) -> list[float]:
    """Return the losses of two steps with other inputs under the same names."""
    with begun(first(2), cache) as pipe:
        rows = data(0, 0)[0]
        return [pipe.step(each, samples=range(3, 3 + ROWS)).item() for each in (rows, rows + 1)]


def thawed_and_loaded() -> tuple[object, list[float], list[float]]:
    """Let a frozen layer learn, with a plan that begins behind it; load other weights.  Return how the first is
    refused, and losses after loading, with those of the plain model."""
    with begun(first(2)) as pipe:
        rows, numbers = data(0, 0)
        pipe.step(rows, samples=numbers)
        freeze(pipe.model, first(1))
        refusal = refusal_of(lambda: pipe.step(rows, samples=numbers))
        freeze(pipe.model, first(2))
        pipe.step(rows, samples=numbers)
        other = {name: tensor * 1.25 for name, tensor in pipe.state_dict().items()}
        pipe.load_state_dict(other)
        model = net()
        model.load_state_dict(other)
        losses = [pipe.step(rows, samples=numbers).item() for _ in range(2)]
        return refusal, losses, [model(rows).item()] * 2
