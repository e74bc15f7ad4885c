"""Activations of frozen layers, kept by sample while the frozen part grows and shrinks: equal to plain training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.jobs import kept_jobs as jobs
from support.jobs.freeze_jobs import Net, first
from support.jobs.replan_jobs import Tower
from support.workers import Workers
from torch import nn

import autopart
from autopart.extras.freezing.kept.activations import Counts
from autopart.ir.errors import BatchError, RefusedError

pytestmark = pytest.mark.timeout(240)
WAY = [first(n) for n in (0, 2, 4, 4, 1, 0)]
"""Frozen in each epoch: more and more layers, then fewer."""


def equal(found: list[jobs.Trained], expected: jobs.Trained) -> None:
    for own in found:
        assert own.losses == pytest.approx(expected.losses, rel=1e-10)
        assert own.evaluated == pytest.approx(expected.evaluated, rel=1e-10)
        for name, tensor in expected.state.items():
            torch.testing.assert_close(own.state[name], tensor, rtol=1e-10, atol=1e-12)


def test_only_what_froze_newly_is_computed_and_only_once() -> None:
    found = jobs.trained(WAY, {"micro_batches": 2}, ranks=1)
    equal([found], jobs.alone(WAY))
    assert found.starts == ["linear", "linear_2", "linear_4", "linear_4", "linear_1", "linear"]
    every = jobs.SAMPLES
    assert found.counts == [
        Counts(),
        Counts(computed=every),
        Counts(computed=every, continued=every),
        Counts(computed=every, continued=every, read=every),
        Counts(computed=2 * every, continued=every, read=every),  # layers learned again, so nothing before them counts
        Counts(computed=2 * every, continued=every, read=every),
    ]
    values = every * jobs.WIDTH * 8
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
    found = pair.run(jobs.trained, WAY, SPREAD[kind])
    equal(found, jobs.alone(WAY))
    fed = [own for rank, own in enumerate(found) if rank in own.plans[3].stages[0].ranks]
    assert sum(own.counts[3].read for own in fed) > 0
    idle = [own for rank, own in enumerate(found) if all(rank not in plan.stages[0].ranks for plan in own.plans)]
    assert all(own.counts[-1] == Counts() for own in idle)


@pytest.mark.slow
def test_each_replica_keeps_its_shard(pair: Workers) -> None:
    found = pair.run(jobs.trained, WAY, SPREAD["replicas"], jobs.ROOM, jobs.net, 2, True)
    assert all(own.counts[3].computed > 0 for own in found)
    for own in found:
        torch.testing.assert_close(own.losses, found[0].losses)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stages": 2, "replicas": 2}, {"stages": 3}, {}], ids=str)
def test_four_ranks_grow_and_shrink_the_frozen_part(workers: Workers, options: dict[str, Any]) -> None:
    equal(workers.run(jobs.trained, WAY, {"micro_batches": 2} | options, jobs.ROOM, jobs.net, 4), jobs.alone(WAY))


@pytest.mark.slow
def test_without_names_nothing_is_kept() -> None:
    way = WAY[1:3]
    found = jobs.trained(way, {}, ranks=1, named=False)
    equal([found], jobs.alone(way))
    assert found.used == [(0, 0), (0, 0)] and found.counts[-1].computed == 2 * jobs.SAMPLES


@pytest.mark.slow
def test_what_does_not_fit_goes_to_the_disk_and_the_rest_is_computed_again() -> None:
    row, way = jobs.WIDTH * 8, [first(2)] * 3
    tight = autopart.freeze.AutoCache(3 * row, 2 * row, samples=jobs.SAMPLES)
    found = jobs.trained(way, {}, tight, ranks=1)
    equal([found], jobs.alone(way))
    assert found.used == [(3 * row, 2 * row)] * 3
    assert [own.read for own in found.counts] == [0, 5, 10]


@pytest.mark.slow
def test_evaluation_finds_frozen_layers_whose_first_weight_the_last_stage_holds_too(pair: Workers) -> None:
    way = [(), ("first", *first(2)), ("first", *first(4))]
    found = pair.run(jobs.trained, way, SPREAD["stages"], jobs.ROOM, Tower)
    assert all("linear" not in stage.ops for own in found for stage in own.plans[-1].stages)
    equal(found, jobs.alone(way, Tower))


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
        jobs.replanned(first(2), make)


def test_other_inputs_under_a_known_name_are_refused_unless_the_first_shall_count() -> None:
    with pytest.raises(BatchError, match="sample 3 came with other inputs"):
        jobs.augmented(jobs.ROOM)
    same = autopart.freeze.AutoCache(1 << 20, augmented=True)
    first_loss, second_loss = jobs.augmented(same)
    assert first_loss == second_loss


def test_layers_that_learn_again_are_refused_until_the_next_plan_and_new_weights_empty_the_cache() -> None:
    refusal, losses, expected = jobs.thawed_and_loaded()
    assert "learns again" in str(refusal) and "pipe.replan" in str(refusal)
    assert losses == pytest.approx(expected, rel=1e-12)
