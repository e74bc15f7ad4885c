"""Layers that freeze and learn again between steps, in real stages: exact, and what is frozen has no backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.jobs import freeze_jobs as jobs
from support.workers import Workers

pytestmark = pytest.mark.timeout(240)
CUTS = ("layers.2", "layers.4", "layers.5")
WAY = [jobs.first(n) for n in (0, 2, 3, 5, 5, 1, 0)]
"""Frozen before each step: more and more of the layers, then fewer."""


def equal(found: Sequence[Any], expected: tuple[list[float], list[Any], dict[str, Any]]) -> None:
    losses, gradients, state = expected
    for own_losses, own_gradients, own_state, *_ in found:
        assert own_losses == pytest.approx(losses, rel=1e-12)
        for mine, reference in zip(own_gradients, gradients, strict=True):
            assert mine.keys() == reference.keys()
            for name, gradient in reference.items():
                torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-14)
        for name, tensor in state.items():
            torch.testing.assert_close(own_state[name], tensor, rtol=1e-10, atol=1e-12)


def backwards(played: Sequence[str], stage: int) -> int:
    return sum(f"{stage}{kind}{micro}" in played for kind in "BI" for micro in range(9))


PAIRS: dict[str, dict[str, Any]] = {
    "1f1b": {"cuts": CUTS[1:2], "schedule": "1f1b"},
    "gpipe": {"cuts": CUTS[1:2], "schedule": "gpipe"},
    "interleaved": {"cuts": CUTS, "schedule": "interleaved", "stages_per_rank": 2, "stages": 4},
    "zb-h1": {"cuts": CUTS[1:2], "schedule": "zb-h1"},
    "searched": {"cuts": CUTS, "schedule": "searched", "stages_per_rank": 2, "stages": 4},
    "replicas": {"stages": 1, "replicas": 2, "zero": 1},
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "1f1b" else pytest.mark.slow) for k in PAIRS])
def test_layers_freeze_and_learn_again_under_one_plan(pair: Workers, kind: str) -> None:
    options: dict[str, Any] = {"stages": 2, "replicas": 1, "micro_batches": 3} | PAIRS[kind]
    found = pair.run(jobs.frozen_steps, jobs.plan_of(2, **options), WAY)
    equal(found, jobs.alone(WAY))
    stages = options["stages"]
    for s in range(stages if stages > 1 else 0):
        end = int(CUTS[s].removeprefix("layers.")) if stages == 4 and s < 3 else 4 if s == 0 else 9
        counts = [sum(backwards(played[step], s) for *_, played in found) for step in range(len(WAY))]
        assert counts == [0 if len(names) >= end else 3 for names in WAY], (s, counts)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_of_frozen_stages_share_their_statistics_alone(workers: Workers, zero: int) -> None:
    options: dict[str, Any] = {"stages": 2, "replicas": 2, "cuts": CUTS[1:2], "micro_batches": 2, "zero": zero}
    plan = jobs.plan_of(4, **options)
    equal(workers.run(jobs.frozen_steps, plan, WAY), jobs.alone(WAY))
    plan = jobs.plan_of(4, frozen=WAY[3], **options)
    assert plan.stages[0].forward_only
    found = workers.run(jobs.frozen_steps, plan, WAY, WAY[3])
    equal(found, jobs.alone(WAY))


@pytest.mark.slow
def test_statistics_of_a_frozen_norm_still_change(pair: Workers) -> None:
    plan = jobs.plan_of(2, norm=True, stages=2, replicas=1, cuts=CUTS[1:2], micro_batches=2)
    found = pair.run(jobs.frozen_steps, plan, WAY, (), True)
    equal(found, jobs.alone(WAY, norm=True, micros=2))
