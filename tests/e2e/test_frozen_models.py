"""Models of five families whose layers freeze 0, 3, 6, ..., planned anew at each change, against plain training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.jobs import frozen_model_jobs as jobs
from support.jobs.frozen_model_jobs import Trained, Way
from support.workers import Workers

pytestmark = pytest.mark.timeout(900)

PIPELINE: dict[str, Any] = {"stages": 2, "replicas": 1}
REPLICAS: dict[str, Any] = {"stages": 2, "replicas": 2, "zero": 1}


def same(found: Sequence[Trained], expected: Trained, rtol: float = 1e-10, atol: float = 1e-11) -> None:
    """Compare every rank with the oracle: losses and gradients by step, weights and Adam moments at the end."""
    moments: dict[str, Any] = {}
    for own in found:
        assert own.losses == pytest.approx(expected.losses, rel=max(rtol, 1e-11))
        for mine, reference in zip(own.gradients, expected.gradients, strict=True):
            assert mine.keys() == reference.keys()
            for name, gradient in reference.items():
                torch.testing.assert_close(mine[name], gradient, rtol=rtol, atol=atol)
        for name, tensor in expected.state.items():
            torch.testing.assert_close(own.state[name], tensor, rtol=rtol, atol=atol)
        moments |= own.moments
    assert moments.keys() == expected.moments.keys()
    for name, value in expected.moments.items():
        torch.testing.assert_close(moments[name], value, rtol=rtol, atol=atol)


def test_a_language_model_with_tied_weights_freezes_and_the_plan_follows(pair: Workers) -> None:
    way = Way("gpt", depth=4, frozen=(0, 2, 3), period=2, options=PIPELINE)
    found = pair.run(jobs.run, way, 2)
    same(found, jobs.alone(way))
    first, *_, last = found[0].plans
    assert [stage.forward_only for stage in first.stages] == [False, False] and last != first, found[0].reasons


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_forty_steps_with_four_changes_of_the_plan(pair: Workers, workers: Workers, family: str, ranks: int) -> None:
    way = Way(family, options=PIPELINE if ranks == 2 else REPLICAS)
    found = (pair if ranks == 2 else workers).run(jobs.run, way, ranks)
    same(found, jobs.alone(way))
    assert len(found[0].plans) == 5
    print(family, ranks, found[0].reasons)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
def test_the_planner_may_choose_all(workers: Workers, family: str) -> None:
    way = Way(family)
    found = workers.run(jobs.run, way, 4)
    same(found, jobs.alone(way))
    print(family, [[(len(s.ops), s.ranks, s.forward_only) for s in plan.stages] for plan in found[0].plans])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_statistics_change_in_frozen_layers_too(pair: Workers, workers: Workers, ranks: int) -> None:
    way = Way("resnet", options={"stages": ranks, "replicas": 1})
    pool = pair if ranks == 2 else workers
    same(pool.run(jobs.run, way, ranks), jobs.alone(way))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
def test_dropout_draws_what_one_rank_draws(workers: Workers, family: str) -> None:
    way = Way(family, dropout=0.2, options=REPLICAS)
    found = workers.run(jobs.run, way, 4)
    same(found, jobs.run(replace(way, options={}), 1, replan=False))


MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "slices": (2, {**PIPELINE, "token_slices": (4, 4), "cuts": ("layers.2",)}),
    "zero bubble": (2, {**PIPELINE, "schedule": "zb-h1", "cuts": ("layers.2",)}),
    "searched": (2, {"stages": 4, "stages_per_rank": 2, "schedule": "searched", "replicas": 1}),
    "in turn": (4, {"stages": 2, "replicas": 2, "replica_policy": "turn", "cuts": ("layers.2",)}),
    "recomputed": (2, {**PIPELINE, "recompute": "all", "cuts": ("layers.2",)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_every_kind_of_plan_has_stages_that_are_forward_only(pair: Workers, workers: Workers, kind: str) -> None:
    ranks, options = MORE[kind]
    way = Way("gpt", depth=5, frozen=(0, 2, 4, 5), period=3, options=options)
    found = (pair if ranks == 2 else workers).run(jobs.run, way, ranks)
    same(found, jobs.alone(way))
    assert all(own.backwards[0] for own in found) and not all(own.backwards[-1] for own in found)


@pytest.mark.slow
@pytest.mark.parametrize("master_weights", [False, True])
def test_the_loss_scale_goes_on(pair: Workers, master_weights: bool) -> None:
    dtype = torch.float16 if master_weights else torch.float32
    options = {"precision": "fp16", "master_weights": master_weights}
    way = Way("gpt", depth=6, frozen=(0, 2, 4, 5), period=6, options={**options, **PIPELINE}, dtype=dtype)
    found = pair.run(jobs.run, way, 2)
    expected = jobs.run(replace(way, options=options), 1, replan=False)
    assert found[0].scales == expected.scales
    assert found[0].losses == pytest.approx(expected.losses, rel=5e-3)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found[0].state[name].float(), tensor.float(), rtol=0.05, atol=5e-3)
