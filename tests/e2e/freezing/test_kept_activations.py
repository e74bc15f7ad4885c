"""Activations of frozen layers, kept by sample while the frozen part grows and shrinks: equal to plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.jobs.freeze_jobs import Net, first, freeze
from support.jobs.replan_jobs import WIDTH, Tower
from support.jobs.step_jobs import refusal_of
from support.workers import Workers
from torch import nn

import autopart
from autopart.extras.freezing import replan as replanning
from autopart.extras.freezing.kept.activations import Counts, activations_of
from autopart.ir.errors import BatchError, RefusedError

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


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(240)
WAY = [first(n) for n in (0, 2, 4, 4, 1, 0)]
"""Frozen in each epoch: more and more layers, then fewer."""


def equal(found: list[Trained], expected: Trained) -> None:
    for own in found:
        assert own.losses == pytest.approx(expected.losses, rel=1e-10)
        assert own.evaluated == pytest.approx(expected.evaluated, rel=1e-10)
        for name, tensor in expected.state.items():
            torch.testing.assert_close(own.state[name], tensor, rtol=1e-10, atol=1e-12)


def test_only_what_froze_newly_is_computed_and_only_once() -> None:
    found = trained(WAY, {"micro_batches": 2}, ranks=1)
    equal([found], alone(WAY))
    assert found.starts == ["linear", "linear_2", "linear_4", "linear_4", "linear_1", "linear"]
    every = SAMPLES
    assert found.counts == [
        Counts(),
        Counts(computed=every),
        Counts(computed=every, continued=every),
        Counts(computed=every, continued=every, read=every),
        Counts(computed=2 * every, continued=every, read=every),  # layers learned again, so nothing before them counts
        Counts(computed=2 * every, continued=every, read=every),
    ]
    values = every * WIDTH * 8
    assert found.used == [(0, 0), (values, 0), (values, 0), (values, 0), (values, 0), (0, 0)]


SPREAD: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "replicas": 1, "micro_batches": 2},
    "replicas": {"stages": 1, "replicas": 2, "micro_batches": 2},
    "zero": {"stages": 1, "replicas": 2, "zero": 1},
    "free": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPREAD)
def test_ranks_that_are_given_data_keep_activations(pair: Workers, kind: str) -> None:
    found = pair.run(trained, WAY, SPREAD[kind])
    equal(found, alone(WAY))
    fed = [own for rank, own in enumerate(found) if rank in own.plans[3].stages[0].ranks]
    assert sum(own.counts[3].read for own in fed) > 0
    idle = [own for rank, own in enumerate(found) if all(rank not in plan.stages[0].ranks for plan in own.plans)]
    assert all(own.counts[-1] == Counts() for own in idle)


@pytest.mark.slow
def test_each_replica_keeps_its_shard(pair: Workers) -> None:
    found = pair.run(trained, WAY, SPREAD["replicas"], ROOM, net, 2, True)
    assert all(own.counts[3].computed > 0 for own in found)
    for own in found:
        torch.testing.assert_close(own.losses, found[0].losses)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stages": 2, "replicas": 2}, {"stages": 3}, {}], ids=str)
def test_four_ranks_grow_and_shrink_the_frozen_part(workers: Workers, options: dict[str, Any]) -> None:
    equal(workers.run(trained, WAY, {"micro_batches": 2} | options, ROOM, net, 4), alone(WAY))


@pytest.mark.slow
def test_without_names_nothing_is_kept() -> None:
    way = WAY[1:3]
    found = trained(way, {}, ranks=1, named=False)
    equal([found], alone(way))
    assert found.used == [(0, 0), (0, 0)] and found.counts[-1].computed == 2 * SAMPLES


@pytest.mark.slow
def test_what_does_not_fit_goes_to_the_disk_and_the_rest_is_computed_again() -> None:
    row, way = WIDTH * 8, [first(2)] * 3
    tight = autopart.freeze.AutoCache(3 * row, 2 * row, samples=SAMPLES)
    found = trained(way, {}, tight, ranks=1)
    equal([found], alone(way))
    assert found.used == [(3 * row, 2 * row)] * 3
    assert [own.read for own in found.counts] == [0, 5, 10]


@pytest.mark.slow
def test_evaluation_finds_frozen_layers_whose_first_weight_the_last_stage_holds_too(pair: Workers) -> None:
    way = [(), ("first", *first(2)), ("first", *first(4))]
    found = pair.run(trained, way, SPREAD["stages"], ROOM, Tower)
    assert all("linear" not in stage.ops for own in found for stage in own.plans[-1].stages)
    equal(found, alone(way, Tower))


class Dropping(Net):
    """Draws random numbers in every layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1, layer.training)
        return self.head(x).square().mean()


class Mixing(Net):
    """Reads the mean over the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) - layer(x).mean(0, keepdim=True)
        return self.head(x).square().mean()


class Sideways(Net):
    """Has the rows on the second axis between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[None].expand(3, -1, -1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


REFUSALS = {
    "dropout": (Dropping, "draws random numbers anew in each step"),
    "norm": (partial(Net, norm=True), "takes statistics of the batch"),
    "mixing": (Mixing, "combines rows"),
    "sideways": (Sideways, "does not have the rows on its first axis"),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "dropout" else pytest.mark.slow) for k in REFUSALS])
def test_frozen_layers_that_are_no_function_of_a_sample_are_refused_by_name(kind: str) -> None:
    make, why = REFUSALS[kind]
    with pytest.raises(RefusedError, match=f"(?s)cannot be kept by sample.*{why}"):
        replanned(first(2), make)


def test_other_inputs_under_a_known_name_are_refused_unless_the_first_shall_count() -> None:
    with pytest.raises(BatchError, match="sample 3 came with other inputs"):
        augmented(ROOM)
    same = autopart.freeze.AutoCache(1 << 20, augmented=True)
    first_loss, second_loss = augmented(same)
    assert first_loss == second_loss


def test_layers_that_learn_again_are_refused_until_the_next_plan_and_new_weights_empty_the_cache() -> None:
    refusal, losses, expected = thawed_and_loaded()
    assert "learns again" in str(refusal) and "pipe.replan" in str(refusal)
    assert losses == pytest.approx(expected, rel=1e-12)
