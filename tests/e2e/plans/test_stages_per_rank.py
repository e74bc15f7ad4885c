"""Several stages on a rank, in loops or folded: a pipe changes its plan and evaluates as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.jobs.any_plan import batches_of, case_of, model_of, pipe_of, plan_for
from support.jobs.step_jobs import cluster
from support.languages.setups import DRAWN, Setup
from support.oracles.one_process import gradients_of, plain_loss, plain_step
from support.workers import Workers

import autopart
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import V

TWO = Setup("tied", (12, 4), counts=(1, 1), per_rank=2, micros=4)
"""The second batch has fewer rows, or fewer micro-batches, than planned."""
PLAIN = replace(TWO, per_rank=1, schedule="1f1b")


def lived(setups: list[Setup]) -> dict[str, Any]:
    """Train two steps under each plan in turn; return losses, gradients, an evaluation loss and the state."""
    found: dict[str, Any] = {"losses": [], "gradients": []}
    batches = batches_of(setups[0])
    with pipe_of(setups[0]) as pipe:
        for number, setup in enumerate(setups):
            if number:
                pipe.adopt(plan_for(setup))
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for batch in batches:
                found["losses"].append(pipe.step(batch).item())
                found["gradients"].append(pipe.gradients())
                optimizer.step()
                optimizer.zero_grad()
        return found | {"evaluated": pipe.eval_loss(batches[0]).item(), "state": dict(pipe.state_dict())}


def lived_alone(setup: Setup, plans: int) -> dict[str, Any]:
    case, model = case_of(setup.model), model_of(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    for batch in batches_of(setup) * plans:
        found["losses"].append(plain_step(case, model, batch, 1).item())
        found["gradients"].append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        evaluated = plain_loss(case, model, batches_of(setup)[0]).item()
    return found | {"evaluated": evaluated, "state": model.state_dict()}


def check(workers: Workers, setups: list[Setup]) -> None:
    """Train under each plan in turn and compare with one process."""
    alone = lived_alone(setups[0], len(setups))
    for ours in workers.run(lived, setups):
        assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert ours["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-10)
        for key, tensor in alone["state"].items():
            torch.testing.assert_close(ours["state"][key], tensor, rtol=1e-9, atol=1e-11)
        for found, expected in zip(ours["gradients"], alone["gradients"], strict=True):
            assert found.keys() == expected.keys()
            for key, gradient in expected.items():
                torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-11)


def test_a_pipe_changes_between_placements_and_orders(pair: Workers) -> None:
    """Tied weights lie on stages of one rank, then of two; a small batch has fewer micro-batches than the order."""
    plans = [
        replace(TWO, schedule=SEARCHED, seed=1, micros=6),
        PLAIN,
        replace(TWO, schedule=DRAWN, per_rank=4, placement=V, split=0.0, micros=3),
        replace(TWO, schedule="zb-v", placement=V, micros=2),
    ]
    check(pair, plans)


def test_stages_of_one_rank_that_share_a_weight_change_with_those_of_two(pair: Workers) -> None:
    plans = [replace(TWO, schedule="interleaved"), replace(PLAIN, schedule="zb-h1", micros=3)]
    check(pair, [replace(plan, model="shared_by_all", rows=(8, 4)) for plan in plans])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "skips", "shared_by_all"])
def test_replicas_of_several_stages_that_share_optimizers_change_their_plan(workers: Workers, name: str) -> None:
    first = Setup(name, (9, 4), 4, (2, 2), 3, V, DRAWN, seed=2, micros=4, zero=1)
    check(workers, [first, Setup(name, (9, 4), 4, (1, 1, 1, 1), schedule=DRAWN, split=0.5, seed=2, micros=4, zero=1)])


def verified(setup: Setup) -> tuple[bool, int]:
    """Return whether `verify` finds a step exact, and the number of gradients that it compared."""
    case, batch = case_of(setup.model), batches_of(setup)[0]
    plan = plan_for(setup)
    found = autopart.verify(model_of(setup), cluster(), sample=batch, loss_fn=case.loss_fn, plan=plan)
    return found.ok, len(found.gradients)


def test_verify_compares_a_plan_with_several_stages_a_rank(pair: Workers) -> None:
    setup = replace(TWO, rows=(8, 8), schedule="zb-v", placement=V, dtype="float32")
    for exact, gradients in pair.run(verified, setup):
        assert exact and gradients > 5


def verified_by_options(name: str, options: dict[str, Any]) -> tuple[bool, set[int]]:
    """Return whether `verify` finds a step exact under the plan that these options give, and the stages compared."""
    case = case_of(name)
    given = {"sample": case.data(8), "loss_fn": case.loss_fn, "costs": "analytic", **options}
    found = autopart.verify(case.model(), cluster(), **given)
    return found.ok, {difference.stage for difference in found.gradients}


def test_verify_compares_a_model_with_dropout_with_one_stage(pair: Workers) -> None:
    options = {"stages": 4, "stages_per_rank": 2, "schedule": "zb-v", "micro_batches": 4}
    for exact, stages in pair.run(verified_by_options, "dropped", options):
        assert exact and len(stages) > 1
