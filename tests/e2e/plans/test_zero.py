"""Replicas that share the optimizer state train bit by bit like replicas with full state, and hold less."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.jobs.step_jobs import EVERY, cluster, compiled, fresh
from support.oracles.one_process import Difference, Expected, difference, plain_step

import autopart

Counts = tuple[int, ...]
SETTLED = ("bucket_bytes", "replica_policy", "recompute")
"""Options that are part of a plan."""


@dataclass(frozen=True)
class Run:
    """The results of a training run on this rank.

    numbers: losses, norms and evaluation losses; tensors: states and gradients of the whole model at several moments;
    held: bytes of optimizer state here; largest: bytes of state of one parameter; trained: names of the parameters it
    updates; stage: this rank's stage, None if it has none.
    """

    plan: autopart.Plan
    stage: int | None
    numbers: list[float]
    tensors: list[dict[str, torch.Tensor | None]]
    held: int
    trained: tuple[str, ...]
    largest: int


@dataclass(frozen=True)
class Comparison:
    """A run with full and a run with shared optimizer state on this rank.

    wrong: what differs by a bit; whole, shared: bytes of state in each run; largest: bytes of state of one parameter;
    trained: names of the parameters updated with shared state; stage: this rank's stage, None if it has none.
    """

    stage: int | None
    wrong: list[str]
    whole: int
    shared: int
    largest: int
    trained: tuple[str, ...]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all non-scalar tensors in an optimizer's state."""
    return sum(_bytes_by_parameter(optimizer))


def _bytes_by_parameter(optimizer: torch.optim.Optimizer) -> list[int]:
    return [sum(t.nbytes for t in kept.values() if t.dim()) for kept in optimizer.state.values()]


def _trained(name: str, asked: dict[str, Any], steps: int, accumulated: int, clip: float | None, more: Any) -> Run:
    """Train and return the results. asked: options of the plan; more: other options."""
    case = EVERY[name]
    half = torch.float16 if more.get("precision") == "fp16" else torch.bfloat16
    dtype = half if more.get("master_weights") else torch.float32
    batch = case.data(8, dtype)
    with compiled(case, fresh(name, dtype, more.get("precision", "fp32")), batch, **asked, **more) as pipe:
        held = {n: p for n, p in pipe.named_parameters() if p.numel()}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        numbers, tensors = [], []
        for step in range(steps):
            numbers += [pipe.step(case.data(8 - step % 2, dtype)).item() for _ in range(accumulated)]
            if clip is not None:
                numbers.append(pipe.clip_grad_norm_(clip).item())
            if step == 1:
                tensors.append(pipe.gradients())
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, 3):  # before updated values were gathered
                tensors.append(dict(pipe.state_dict()))
                numbers.append(pipe.eval_loss(batch).item())
        numbers.append(pipe.eval_loss(batch).item())
        tensors.append(dict(pipe.state_dict()))
        largest = max(_bytes_by_parameter(optimizer), default=0)
        stage = next(iter(pipe.plan.decision.stages_of_rank(pipe.rank)), None)
        found = Run(pipe.plan, stage, numbers, tensors, state_bytes(optimizer), tuple(held), largest)
    return found


def compare_sharing(
    name: str, counts: Counts, options: dict[str, Any], steps: int = 10, accumulated: int = 1, clip: float | None = None
) -> Comparison:
    """Train with full and with shared optimizer state under the same cuts and compare.

    The cuts must agree because batches of other sizes are rounded differently.
    """
    settled = {key: value for key, value in options.items() if key in SETTLED}
    more = {key: value for key, value in options.items() if key not in SETTLED}
    asked = {"stages": len(counts), "replicas": counts, "micro_batches": 2, "schedule": "1f1b", "zero": 0, **settled}
    whole = _trained(name, asked, steps, accumulated, clip, more)
    assert not whole.plan.decision.zero
    plan = replace(whole.plan, decision=replace(whole.plan.decision, zero=1))
    shared = _trained(name, {"plan": plan}, steps, accumulated, clip, more)
    assert shared.plan.decision.zero == 1
    wrong = [
        f"number {i}" for i, pair in enumerate(zip(whole.numbers, shared.numbers, strict=True)) if len(set(pair)) > 1
    ]
    for moment, (before, after) in enumerate(zip(whole.tensors, shared.tensors, strict=True)):
        assert before.keys() == after.keys()
        wrong += [f"{key} at {moment}" for key, tensor in before.items() if not _same(tensor, after[key])]
    return Comparison(shared.stage, wrong, whole.held, shared.held, whole.largest, shared.trained)


def moved(counts: Counts, other: Counts, zeros: tuple[int, int]) -> Difference | None:
    """Train a step, change the plan within an accumulated step, and return the difference from one process."""
    case = EVERY["tied"]
    batch, model, cpus = case.data(7), case.model(), cluster()
    plans = [
        autopart.plan(
            case.model(), cpus, sample=batch, loss_fn=case.loss_fn, costs="analytic", stages=len(wanted),
            replicas=wanted, micro_batches=2, schedule="1f1b", zero=zero,
        )
        for wanted, zero in zip((counts, other), zeros, strict=True)
    ]  # fmt: skip
    with compiled(case, fresh("tied"), batch, plan=plans[0]) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        pipe.step(batch)
        pipe.adopt(plans[1])
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        expected = plain_step(case, model, batch, 2)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return difference(loss, found, state, Expected.of(expected, model)) if leads else None


def names_without_values() -> list[str]:
    """Return the parameters that have no values after a pipe was closed without synchronizing the model."""
    case = EVERY["stack"]
    model = case.model()  # a new model, because it loses its values
    batch = case.data(8)
    asked = {"stages": 1, "replicas": 2, "micro_batches": 1, "zero": 1}
    with compiled(case, model, batch, **asked) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(batch)
        optimizer.step()
        mine = {name for name, _ in pipe.named_parameters()}
        pipe.close(sync=False)
    emptied = {name for name, p in model.named_parameters() if not p.numel()}
    assert emptied == {name for name, _ in model.named_parameters()} - mine
    return sorted(emptied)


def frozen_and_thawed(zero: int) -> list[dict[str, torch.Tensor]]:
    """Return the states of a run in which one parameter is frozen for two steps and another is trained only later."""
    case, captures = EVERY["skips"], fresh("skips")
    model, batch = captures.model, case.data(8)
    first, *_, last = model.parameters()
    last.requires_grad_(False)
    states = []
    with compiled(case, captures, batch, stages=1, replicas=2, micro_batches=2, zero=zero) as pipe:
        for step in range(5):
            first.requires_grad_(step not in (1, 2))
            last.requires_grad_(step > 1)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            pipe.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            states.append(dict(pipe.state_dict()))
    for parameter in (first, last):
        parameter.requires_grad_(True)
    return states


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def shared_state(
    pool: Any, name: str, counts: Counts, accumulated: int = 1, clip: float | None = None, **options: Any
) -> list[Comparison]:
    """Train with and without shared optimizer state, check the results and return them by rank.

    The replicas of a stage together must hold exactly one copy of the state, divided as evenly as whole parameters
    allow. counts: replicas of each stage, at most 2, so that sums do not depend on the order of addition.
    """
    results: list[Comparison] = pool.run(compare_sharing, name, counts, options, 10, accumulated, clip)
    assert [result.wrong for result in results] == [[]] * len(results)
    assert any(result.whole for result in results)
    for number, count in enumerate(counts):
        stage = [result for result in results if result.stage == number]
        assert len(stage) == count
        whole, largest = stage[0].whole, stage[0].largest
        assert sum(result.shared for result in stage) == whole
        assert max(result.shared for result in stage) <= whole / count + largest * (1 - 1 / count)
        trained = [name for result in stage for name in result.trained]
        assert len(set(trained)) == len(trained)
    return results


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, pytest.param({"master_weights": True}, marks=pytest.mark.slow)], ids=str)
def test_two_replicas_share_the_state_of_the_optimizer(pair, options):
    results = shared_state(pair, "stack", (2,), clip=0.1, bucket_bytes=2000, **options)
    assert max(result.shared for result in results) <= 0.6 * results[0].whole


@pytest.mark.slow
def test_replicas_of_pipeline_stages_share_the_state_of_accumulated_steps(workers):
    shared_state(workers, "llama_tied", (2, 2), accumulated=2, clip=0.1, bucket_bytes=10_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "other", "zeros"),
    [((2, 1), (1, 3), (1, 0)), ((1, 3), (2, 2), (0, 1)), ((2, 2), (4,), (1, 1)), ((3, 1), (1, 1), (1, 1))],
)
def test_a_pipe_adopts_a_plan_with_different_sharing(workers, counts, other, zeros):
    assert workers.run(moved, counts, other, zeros)[0].within(torch.float32)


@pytest.mark.slow
def test_closing_without_sync_empties_parameters_of_other_owners(pair):
    here, there = pair.run(names_without_values)
    assert here and there and not set(here) & set(there)


@pytest.mark.slow
def test_freezing_and_unfreezing_works_with_shared_state(pair):
    whole, shared = (pair.run(frozen_and_thawed, zero)[0] for zero in (0, 1))
    for before, after in zip(whole, shared, strict=True):
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(whole[0][name], tensor) for name, tensor in whole[-1].items())
