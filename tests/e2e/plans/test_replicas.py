"""Stages on several ranks: what `test_any_plan` does not draw of replicas."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from typing import Any

import pytest
import torch
from support.jobs.sparse_jobs import Bag, alone, batches, optimizers
from support.jobs.step_jobs import EVERY, Counts, cluster, compiled, fresh, refusal_of, replica_options
from support.oracles.one_process import Difference, Expected, difference, plain_loss, plain_step
from torch.nn.utils import clip_grad_norm_

import autopart
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.errors import BatchError
from autopart.options import read_options
from autopart.pipe.pipe import Pipe


def uneven_devices(
    name: str, slower: tuple[int, ...], rows: tuple[int, ...], options: dict[str, Any]
) -> tuple[list[Difference] | None, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Take steps planned for devices of different speeds and compare with one process.

    slower: how many times slower each device is than the fastest. Every rank returns the ranks and shares of each
    stage, rank 0 also the differences of each step.
    """
    case, found, reference = EVERY[name], [], EVERY[name].model()
    devices = tuple(Device("cpu", 1 << 40, 10**9 // each, 10**9 // each) for each in slower)
    cpus = Cluster(devices, (Level(len(devices), Link(0, 10**12)),))
    torch.set_num_threads(1)
    asked = read_options(costs="analytic", loss_fn=case.loss_fn, micro_batches=2, **options)
    with Pipe(fresh(name), cpus, asked, case.data(rows[0])) as pipe:
        planned = [(stage.ranks, stage.division.shares) for stage in pipe.plan.stages]
        for count in rows:
            loss = pipe.step(case.data(count)).item()
            gradients, state = pipe.gradients(), pipe.state_dict()
            if pipe.rank == 0:
                expected = Expected.of(plain_step(case, reference, case.data(count), 2), reference)
                found.append(difference(loss, gradients, state, expected))
        leads = pipe.rank == 0
    return (found if leads else None), planned


def trained(name: str, counts: Counts, steps: int, clip: float, policy: str = "split") -> dict[str, Any]:
    """Train with AdamW and clipping; return losses and norms of the pipe and of one process.

    Also returns the stage of this rank and the parameters and buffers it holds.
    """
    case = EVERY[name]
    reference, batch = case.model(), case.data(7)
    micros = max(2, *counts) if policy == "turn" else 2
    with compiled(case, fresh(name), batch, **replica_options(counts, micros, replica_policy=policy)) as pipe:
        mine = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        own = dict(reference.named_parameters()).keys() | dict(reference.named_buffers()).keys()
        losses, norms = [], []
        for _ in range(steps):
            losses.append((pipe.step(batch).item(), plain_step(case, reference, batch, micros).item()))
            norms.append((pipe.clip_grad_norm_(clip).item(), clip_grad_norm_(reference.parameters(), clip).item()))
            for optimizer in (mine, plain):
                optimizer.step()
                optimizer.zero_grad()
        reference.eval()
        evaluated = pipe.eval_loss(case.data(5)).item(), plain_loss(case, reference, case.data(5)).item()
        return {
            "losses": losses,
            "norms": norms,
            "evaluated": evaluated,
            "stage": next(iter(pipe.plan.decision.stages_of_rank(pipe.rank)), None),
            "held": {n: t.detach().clone() for n, t in pipe.session.tensors.held.items() if n in own},
        }


def sparse(replicas: int, zero: int = 0) -> dict[str, Any]:
    """Train embeddings with sparse gradients in one stage; return losses, norms, state and which gradients are
    sparse.
    """
    steps = batches()
    pipe = autopart.compile(
        Bag(False),
        cluster(),
        sample=steps[0],
        stages=1,
        replicas=replicas,
        micro_batches=1,
        costs="analytic",
        zero=zero,
    )
    with pipe:
        steppers = optimizers(pipe.named_parameters(), False)
        losses, norms = [], []
        for batch in steps:
            losses.append(pipe.step(*batch).item())
            kinds = {n: p.grad.is_sparse for n, p in pipe.named_parameters() if p.grad is not None}
            norms.append(pipe.clip_grad_norm_(0.05).item())
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        return {"losses": losses, "norms": norms, "state": pipe.state_dict(), "sparse": kinds}


def kept_gradients() -> dict[str, bool]:
    """Keep gradients of a step while another step runs.

    Return whether they are unchanged ("same"), share no memory with the new ones ("apart"), and whether the memory of a
    step's gradients is released after they are detached in place, as some optimizers do ("freed").
    """
    case = EVERY["stack"]
    with compiled(case, fresh("stack"), case.data(8), **replica_options((2,), 2)) as pipe:
        pipe.step(case.data(8))
        kept = [p.grad for p in pipe.parameters() if p.grad is not None]
        before = [gradient.clone() for gradient in kept]
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(case.data(6))
        fresh_ones = [p.grad for p in pipe.parameters() if p.grad is not None]
        apart = {g.untyped_storage().data_ptr() for g in kept}.isdisjoint(
            g.untyped_storage().data_ptr() for g in fresh_ones
        )
        freed = threading.Event()
        weakref.finalize(fresh_ones[0].untyped_storage(), freed.set)
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
            parameter.grad = None
        fresh_ones.clear()
        same = all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
        # The thread that sums them may hold them for a moment longer.
        return {"same": same, "apart": apart, "freed": freed.wait(5)}


def different_batches() -> str:
    """Return the error of a step in which each rank passes different rows."""
    case = EVERY["stack"]
    with compiled(case, fresh("stack"), case.data(8), **replica_options((2,), 2)) as pipe:
        x, y = case.data(8)
        error = refusal_of(lambda: pipe.step((x + pipe.rank, y)))
        assert isinstance(error, BatchError), error
        return str(error)


def moved(counts: Counts, other: Counts) -> Difference | None:
    """Accumulate a step under one plan and a step under another, and return the difference from one process."""
    case = EVERY["tied"]
    batch, model = case.data(7), case.model()
    cpus = cluster()
    plans = [
        autopart.plan(
            case.model(), cpus, sample=batch, loss_fn=case.loss_fn, costs="analytic", **replica_options(wanted, 2)
        )
        for wanted in (counts, other)
    ]
    with compiled(case, fresh("tied"), batch, plan=plans[0]) as pipe:
        pipe.step(batch)
        pipe.adopt(plans[1])
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    for _ in range(2):
        expected = plain_step(case, model, batch, 2)
    return difference(loss, found, state, Expected.of(expected, model)) if leads else None


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slower", "rows", "options"),
    [
        ("llama_tied", (1, 3), (16, 7), {}),
        ("gpt2", (1, 2, 4, 2), (18, 13), {}),
        ("bert", (2, 1, 1, 3), (24, 5), {}),
        ("t5", (1, 4, 2, 2), (20, 9), {"stages": 2, "replicas": 2}),
        ("convnext", (1, 2, 3, 1), (16, 11), {"stages": 1, "replicas": 4}),
        ("tied", (3, 1, 2, 5), (22, 9), {"zero": 1, "recompute": "all"}),
    ],
)
def test_a_plan_for_devices_of_different_speeds_equals_one_process(workers, pair, name, slower, rows, options):
    """The planner must choose unequal shares."""
    found, planned = (pair if len(slower) == 2 else workers).run(uneven_devices, name, slower, rows, options)[0]
    unequal = 0
    for ranks, shares in planned:
        for (a, mine), (b, other) in itertools.combinations(zip(ranks, shares, strict=True), 2):
            assert (mine >= other) if slower[a] < slower[b] else (mine <= other or slower[a] == slower[b])
        unequal += len(set(shares)) > 1
    assert unequal, planned
    for off in found:
        assert off.within(torch.float32), off


def test_replicas_are_equal_bit_by_bit_after_many_clipped_steps(workers):
    counts = (2, 2)
    results = workers.run(trained, "tied", counts, 10, 0.1)
    for result in results:
        for found, expected in (*result["losses"], *result["norms"], result["evaluated"]):
            assert found == pytest.approx(expected, rel=1e-4)
        for other in results:
            for held in result["held"].keys() & other["held"].keys():
                assert torch.equal(result["held"][held], other["held"][held])
    assert sorted(result["stage"] for result in results) == [s for s, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("zero", [0, 1])
def test_sparse_gradients_stay_sparse(pair, zero):
    losses, norms, _, state = alone(False)
    results = pair.run(sparse, 2, zero)
    for mine in [results] if zero else [[result] for result in results]:
        assert {name.partition(".")[0]: kind for result in mine for name, kind in result["sparse"].items()} == {
            "words": True, "bag": True, "layer": False, "head": False,
        }  # fmt: skip
    for result in results:
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["losses"], losses, strict=True))
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["norms"], norms, strict=True))
        assert all(torch.allclose(result["state"][name], tensor) for name, tensor in state.items())


def test_gradients_kept_by_the_user_are_not_changed_by_the_next_step(pair):
    assert pair.run(kept_gradients) == [{"same": True, "apart": True, "freed": True}] * 2


def test_replicas_with_different_batches_are_refused(pair):
    for text in pair.run(different_batches):
        assert "different batches" in text and "DistributedSampler" in text


@pytest.mark.slow
def test_a_pipe_adopts_another_number_of_replicas(workers):
    assert workers.run(moved, (2, 1), (1, 3))[0].within(torch.float32)
