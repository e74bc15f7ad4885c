"""Whether another plan pays for the steps that remain, with what it takes to change to it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from autopart.ir.cluster import Cluster
from autopart.ir.plan import Plan
from autopart.ir.size import Size
from autopart.planning.make import make_plan
from autopart.planning.simulated import simulated_step_ns
from autopart.session.executors.kinds import projected
from autopart.session.placement import placement_of
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.replanning.moving import KeptBytes, Pairs, moved_bytes, predicted_s
from autopart.session.session import Session
from autopart.session.session_plan import Preparing

WORTH = 0.02
"""Without a number of steps, a plan has to make the step shorter by this part: predictions are not worth more."""


@dataclass(frozen=True, slots=True)
class Replanned:
    """What `pipe.replan` found, and what it did.

    plan: the best plan for the model as it is.  adopted: whether it runs now.  reason: in words.  before_s, after_s:
    simulated seconds of a step of the plan that ran, and of `plan`.  moved_bytes: between ranks, if it is adopted.
    pause_s: predicted seconds of the change.  took_s: measured ones, 0 if it was not adopted; moving_s: those of them
    in which bytes moved.  planning_s: seconds that the search took before.
    """

    plan: Plan
    adopted: bool
    reason: str
    before_s: float
    after_s: float
    moved_bytes: int
    pause_s: float
    took_s: float
    moving_s: float
    planning_s: float


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What rank 0 tells all ranks: the best plan, whether it is the one that runs, the step of that one, and the bytes
    that move."""

    plan: Plan
    runs: bool
    now_ns: int
    pairs: Pairs


def replan(
    session: Session, machines: Cluster, steps: int | None, state_bytes: Mapping[str, int], prepare: Preparing
) -> Replanned:
    """Plan anew for the model as it is, and go on under that plan if it pays.  Collective; see `Pipe.replan`.

    machines: the cluster with its devices as fast as they are now.
    state_bytes: of the optimizer's state of each parameter on this rank.  prepare: as for `Session.adopt`."""
    world = session.world
    with session.call("replan"):
        began = time.perf_counter()
        with together(world, "reading the model"):
            session.follow_model(training=True)
        known = world.gather_objects(KeptBytes({**state_bytes}, _beside(session)))
        proposal = from_rank(world, 0, "planning", partial(_proposed, session, machines, known))
        planning_s = time.perf_counter() - began
        preparing_s = max(row[0] for row in world.gather_numbers([session.preparing_s]))
        pause_s = preparing_s + predicted_s(world, proposal.pairs)
    plan = proposal.plan
    adopted, reason = _judged(proposal, steps, pause_s)
    took_s = moving_s = 0.0
    if adopted:
        began = time.perf_counter()
        session.adopt(plan, prepare)
        took = world.gather_numbers([time.perf_counter() - began, session.moving_s])
        took_s, moving_s = (max(column) for column in zip(*took, strict=True))
    return Replanned(
        plan, adopted, reason, proposal.now_ns * 1e-9, plan.step_ns * 1e-9,
        sum(proposal.pairs.values()), pause_s, took_s, moving_s, planning_s,
    )  # fmt: skip


def _beside(session: Session) -> dict[str, int]:
    """Return the bytes of the master weight and the gradient of each parameter that this rank owns."""
    owners, tensors = session.context.placement.owners, session.tensors
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.driven.items():
        if owners.get(name) == session.world.rank:
            sizes[name] += tensor.nbytes if name in tensors.masters.by_name else 0
            sizes[name] += tensor.grad.nbytes if tensor.grad is not None else 0
    return dict(sizes)


def _proposed(session: Session, cluster: Cluster, kept: Sequence[KeptBytes]) -> _Proposal:
    """Return the best plan for the model as it is, and how it compares with the one that runs.  On rank 0."""
    options = replace(session.options, plan=None)
    batch, captures = session.batch, session.captures
    best = make_plan(captures, batch, cluster, options)
    running = session.plan
    captured = captures(batch, Size(max(running.micro_rows)))
    decision = projected(captured, session.graph, running.decision)
    now_ns = simulated_step_ns(replace(running, decision=decision), captured, captures, batch, cluster, options)
    graph = best.captured.graph
    placement = placement_of(graph, best.plan.decision)
    runs = best.plan.decision == decision
    return _Proposal(best.plan, runs, now_ns, moved_bytes(graph, session.context.placement, placement, kept))


def _judged(proposal: _Proposal, steps: int | None, pause_s: float) -> tuple[bool, str]:
    """Return whether to go on under the proposed plan, and why."""
    now_s, then_s = proposal.now_ns * 1e-9, proposal.plan.step_ns * 1e-9
    if proposal.runs:
        return False, "the plan that runs is still the best one"
    gain_s = now_s - then_s
    compared = f"a step would take {then_s * 1e3:.1f} ms instead of {now_s * 1e3:.1f} ms (simulated)"
    if steps is None:
        return gain_s >= WORTH * now_s, f"{compared}, {gain_s / now_s:.0%} less; {WORTH:.0%} are asked"
    return gain_s * steps > pause_s, (
        f"{compared}, {gain_s * steps:.2f} s less in the {steps} steps that remain; changing takes {pause_s:.2f} s"
    )


def state_bytes_of(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> dict[str, int]:
    """Return the bytes of an optimizer's state by parameter.  names: of parameters by identity."""
    if optimizer is None:
        return {}
    return {
        names[id(parameter)]: sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
