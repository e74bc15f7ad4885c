"""Whether another plan pays for the steps that remain, with what it takes to change to it.

The plan that runs and those that may follow it are judged by one set of costs.  Measured again while a device is slow,
ops would take as long as the machine lets them at that moment, and two plans would differ by that alone.  So where
devices have become slower, or faster, nothing is measured: the times under which the plan that runs was made are
extended to other sizes, and to devices of other speeds, as the planner does (`passes.ops.cost_model`).  Where they are
not known, since that plan was given or layers have frozen since, ops are measured once at the moment: both plans are
then wrong by the same factor.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from autopart.capture import Captured
from autopart.costs.sources import CostedGraph, CostSource, costed, source_for
from autopart.extras.freezing.carried import KeptBytes, Pairs, moved_bytes, predicted_s
from autopart.extras.freezing.kept.activations import AutoCache, activations_of
from autopart.extras.freezing.kept.code import frozen_code
from autopart.ir.cluster import Cluster, Device
from autopart.ir.errors import AutopartError, PlanError, RefusedError, UsageError
from autopart.ir.graph import Size
from autopart.ir.plan import Decision, Plan
from autopart.options import Options
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.program.projection import check_gradients_stay
from autopart.passes.program.schedules import find
from autopart.passes.simulation.estimate import estimate
from autopart.planning.make import Planned, make_plan
from autopart.planning.simulated import estimated_plan
from autopart.session.executors.kinds import projected
from autopart.session.placement import placement_of
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.session import Preparing, Session
from autopart.session.step.parts import micro_cut
from autopart.state.contents import driven_names
from autopart.state.core import Core
from autopart.state.optimizers import Optimizers

WORTH = 0.02
"""Without a number of steps, a plan has to make the step shorter by this part: predictions are not worth more."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A plan that begins behind the frozen layers.

    kept: the values that it begins with, of the batch that it was made for.  reading_s, computing_s: seconds that a
    rank takes in a step to read them, and to compute them instead.  hits: the part of the samples that fits.  first:
    steps until each sample came once, 0 if that is not known.
    """

    planned: Planned
    kept: tuple[tuple[str, torch.Tensor], ...]
    reading_s: float
    computing_s: float
    hits: float
    first: int

    @property
    def beside_s(self) -> float:
        """Seconds of a step for activations, once each sample that fits is kept."""
        return self.hits * self.reading_s + (1 - self.hits) * self.computing_s

    def once_s(self, steps: int) -> float:
        """Seconds more that the steps take in which the samples come for the first time."""
        return min(self.first, steps) * max(0.0, self.computing_s - self.beside_s)


def behind_frozen(session: Session, cluster: Cluster, cache: AutoCache, options: Options) -> Behind | str:
    """Return the best plan that begins behind the frozen layers, or why there is none.  Local, on rank 0.

    Computes the values twice for the batch that was planned for, and reads them once.  Raises RefusedError if the
    frozen layers are no function of each sample alone, and UsageError with schedules and slices that know no cache.
    """
    captures, batch = session.captures, session.batch.plain
    _refuse_options(options)
    code = frozen_code(captures, batch, max(session.plan.micro_rows), session.world.device)
    if not code.values:
        return "no layer is frozen whose activations could be kept"
    if any(code.captured.tensors[name].is_meta for name in code.tensors):
        return "rank 0 has no values of some frozen layers, which the planner would time"
    begun, computing_s, reading_s = activations_of(session).tried(batch, code, cache)
    try:
        planned = make_plan(captures, begun, cluster, options)
    except RefusedError:
        raise
    except AutopartError as error:  # an option may name a layer that is not planned any more
        return f"without the frozen layers there is no plan: {error.what}"
    weights = sum(code.captured.tensors[name].nbytes for name in code.tensors)
    peak = max((estimate.peak_bytes for estimate in planned.plan.estimates), default=0)
    if peak + weights > cluster.least_memory_bytes((0,)):
        return "the ranks that are given data have no memory for the frozen layers"
    rows = batch.rows or 1
    division = planned.plan.stages[0].division
    windows = [division.windows(micro, own) for micro, own in enumerate(micro_cut(rows, planned.plan.micro_rows))]
    own_rows = [sum(window.end - window.first for window in of_rank) for of_rank in zip(*windows, strict=True)]
    share = float(max(own_rows)) / rows
    size = sum(tensor.nbytes for _, tensor in begun.kept) / rows
    room = (cache.memory_bytes + cache.disk_bytes) * len(planned.plan.stages[0].ranks) / size
    hits = 1.0 if cache.samples is None else min(1.0, room / cache.samples)
    first = 0 if cache.samples is None else -(-cache.samples // rows)
    return Behind(planned, begun.kept, reading_s * share, computing_s * share, hits, first)


def _refuse_options(options: Options) -> None:
    if options.schedule != "auto" and not find(options.schedule).synchronous:
        raise UsageError(
            f"activations cannot be kept under schedule {options.schedule!r}",
            why="its batches enter through pipe.train, which takes no names of samples",
            fix="compile with a synchronous schedule, or leave cache= out of pipe.replan",
        )
    if options.token_slices is not None:
        raise UsageError(
            "activations cannot be kept while sequences are cut into slices",
            fix="compile without token_slices=, or leave cache= out of pipe.replan",
        )


@dataclass(frozen=True, slots=True)
class Replanned:
    """What `pipe.replan` found, and what it did.

    plan: the best plan for the model as it is.  adopted: whether it runs now.  reason: in words.  before_s, after_s:
    simulated seconds of a step of the plan that ran, and of `plan`.  moved_bytes: between ranks, if it is adopted.
    pause_s: predicted seconds of the change.  took_s: measured ones, 0 if it was not adopted; moving_s: those of them
    in which bytes moved.  planning_s: seconds that the search took before.
    cached: whether `plan` begins behind the frozen layers, with their activations read by sample; reading_s: seconds of
    a step for them, which before_s and after_s contain.
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
    cached: bool = False
    reading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What rank 0 tells all ranks: the best plan, whether it is the one that runs, the seconds of a step of that one
    (None if it cannot go on), and the bytes that move.

    begun: what the plan begins with, without numbers; () if with the batch.  beside_s, once_s: seconds for that in a
    step, and once.  note: why the plan does not begin behind frozen layers, if that was asked.
    """

    plan: Plan
    runs: bool
    now_s: float | None
    pairs: Pairs
    begun: tuple[tuple[str, torch.Tensor], ...] = ()
    beside_s: float = 0.0
    once_s: float = 0.0
    note: str = ""

    @property
    def then_s(self) -> float:
        """Seconds of a step of the plan."""
        return self.plan.step_ns * 1e-9 + self.beside_s


def replan(
    core: Core, steps: int | None, optimizers: Optimizers, prepare: Preparing, cache: AutoCache | None
) -> Replanned:
    """Plan again for the model as it is, and continue under that plan if it pays.  Collective; see `Pipe.replan`.

    prepare: as for `Session.adopt`.  cache: for the activations of frozen layers, None for the one that was given
    before."""
    session = core.session
    world, machines, names = session.world, core.now(), driven_names(core)
    state_bytes = {
        names[id(parameter)]: sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
    begun: list[tuple[str, torch.Tensor]] = []
    with session.call("replan"):
        began = time.perf_counter()
        with together(world, "reading the model"):
            session.road.follow_model(training=True)
            session.captures(session.batch.plain, Size(max(session.plan.micro_rows)))  # so that every rank watches it
            if cache is not None:
                activations_of(session).open(cache)
        known = world.gather_objects(KeptBytes(state_bytes, _beside(session)))
        proposal = from_rank(world, 0, "planning", partial(_proposed, session, machines, known, steps, begun))
        planning_s = time.perf_counter() - began
        preparing_s = max(row[0] for row in world.gather_numbers([session.standing.preparing_s]))
        pause_s = preparing_s + predicted_s(world, proposal.pairs)
    plan = proposal.plan
    adopted, reason = _judged(proposal, steps, pause_s)
    took_s = moving_s = 0.0
    if adopted:
        began = time.perf_counter()
        session.adopt(plan, prepare, begun or [(n, torch.zeros_like(t, device="cpu")) for n, t in proposal.begun])
        activations_of(session).beside_s = proposal.beside_s
        took = world.gather_numbers([time.perf_counter() - began, session.standing.moving_s])
        took_s, moving_s = (max(column) for column in zip(*took, strict=True))
    return Replanned(
        plan, adopted, reason, proposal.now_s or float("inf"), proposal.then_s, sum(proposal.pairs.values()), pause_s,
        took_s, moving_s, planning_s, bool(proposal.begun), proposal.beside_s,
    )  # fmt: skip


def _beside(session: Session) -> dict[str, int]:
    """Return the bytes of the master weight and the gradient of each parameter that this rank owns."""
    owned, tensors = session.standing.context.placement.owned_by(session.world.rank), session.tensors
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.driven.items():
        if name in owned:
            sizes[name] += tensor.nbytes if name in tensors.masters.by_name else 0
            sizes[name] += tensor.grad.nbytes if tensor.grad is not None else 0
    return dict(sizes)


def _proposed(
    session: Session,
    cluster: Cluster,
    kept: Sequence[KeptBytes],
    steps: int | None,
    begun: list[tuple[str, torch.Tensor]],
) -> _Proposal:
    """Return the best plan for the model as it is, and how it compares with the one that runs.  On rank 0.

    begun: gets what the plan begins with, if it begins behind frozen layers."""
    options = _asked(session, cluster)
    best = make_plan(session.captures, session.batch.plain, cluster, options)
    cache, behind, note = activations_of(session).cache, None, ""
    if cache is not None:
        found = behind_frozen(session, cluster, cache, options)
        behind, note = (None, found) if isinstance(found, str) else (found, "")
        if behind is not None and not _pays(behind, best.plan, steps):
            behind, note = None, "reading the activations of frozen layers would take longer than computing them"
    if behind is not None:
        best = behind.planned
        begun.extend(behind.kept)
    session.costs = best.costs if cluster == session.cluster else session.costs
    now_s, decision = _running(session, cluster, options)
    same = activations_of(session).values == tuple(name for name, _ in begun)
    runs = same and decision is not None and best.plan.decision == decision
    placement = placement_of(best.captured.graph, best.plan.decision)
    pairs = moved_bytes(best.captured.graph, session.standing.context.placement, placement, kept)
    if behind is None:
        return _Proposal(best.plan, runs, now_s, pairs, note=note)
    shapes = tuple((name, torch.empty_like(tensor, device="meta")) for name, tensor in begun)
    return _Proposal(best.plan, runs, now_s, pairs, shapes, behind.beside_s, behind.once_s(steps or 0))


def _asked(session: Session, cluster: Cluster) -> Options:
    """Return the options of another plan; where devices have other speeds than at first, with costs that are known."""
    options = replace(session.options, plan=None)
    if cluster == session.cluster:
        return options
    backend, device = session.standing.context.options.backend, session.cluster.devices[0]
    source = source_for(options.costs, backend)
    whole = session.captures(session.batch.plain, Size(max(session.plan.micro_rows)))
    known = session.costs
    if known is None or known.graph.structure_digest() != whole.graph.structure_digest():
        known = costed(whole, device, source)
    return replace(options, costs=known_costs(known, device, source), backend=backend)


def _pays(behind: Behind, whole: Plan, steps: int | None) -> bool:
    """Return whether a plan behind the frozen layers is faster than one for the whole model, over the steps to come."""
    gain_s = (whole.step_ns - behind.planned.plan.step_ns) * 1e-9 - behind.beside_s
    return gain_s > 0 if steps is None else gain_s * steps > behind.once_s(steps)


def _running(session: Session, cluster: Cluster, options: Options) -> tuple[float | None, Decision | None]:
    """Return the simulated seconds of a step of the plan that runs, for the model as it is, and its decision; None if
    it cannot run that: it begins behind layers that learn again, or no stage holds a parameter that learns now."""
    batch, captures, running = session.batch, session.captures, session.plan
    try:
        captured = captures(batch, Size(max(running.micro_rows)))
    except RefusedError:
        if batch.kept:
            return None, None
        raise
    try:
        decision = projected(captured, session.graph, running.decision)
        check_gradients_stay(captured.graph, decision.stages, session.graph, running.decision)
    except PlanError:
        return None, None
    estimated = estimated_plan(replace(running, decision=decision), captured, captures, batch, cluster, options)
    now_ns = estimate(*estimated).step_ns
    return now_ns * 1e-9 + activations_of(session).beside_s, decision


def _judged(proposal: _Proposal, steps: int | None, pause_s: float) -> tuple[bool, str]:
    """Return whether to go on under the proposed plan, and why."""
    now_s, then_s = proposal.now_s, proposal.then_s
    noted = f"; {proposal.note}" if proposal.note else ""
    if proposal.runs:
        return False, f"the plan that runs is still the best one{noted}"
    if now_s is None:
        return True, f"the plan that ran has no place for what learns now{noted}"
    gain_s = now_s - then_s
    reading = f", with {proposal.beside_s * 1e3:.1f} ms for activations that are kept" if proposal.begun else ""
    compared = f"a step would take {then_s * 1e3:.1f} ms{reading} instead of {now_s * 1e3:.1f} ms (simulated)"
    if steps is None:
        return gain_s >= WORTH * now_s, f"{compared}, {gain_s / now_s:.0%} less; {WORTH:.0%} are asked{noted}"
    once_s = pause_s + proposal.once_s
    return gain_s * steps > once_s, (
        f"{compared}, {gain_s * steps:.2f} s less in the {steps} steps that remain; changing takes {once_s:.2f} s"
        f"{noted}"
    )


def known_costs(known: CostedGraph, device: Device, otherwise: str | CostSource) -> CostSource:
    """Return a source of costs that extends `known` and measures nothing.

    known: costs of the program at one size on `device`.  otherwise: the source for other programs than that.
    """
    digest = known.graph.structure_digest()

    def source(captured: Captured, on: Device) -> CostedGraph:
        graph = captured.graph
        if graph.structure_digest() != digest:
            return costed(captured, on, otherwise)
        other = None if graph.size == known.graph.size else graph
        costs = CostModel(known.graph, other, (device, on)).graph(graph.size, 1).ops
        ops = tuple(replace(op, cost=own.cost) for op, own in zip(graph.ops, costs, strict=True))
        return CostedGraph(replace(graph, ops=ops), known.source, known.notes)

    return source
