"""Where it is computed: which ops on which ranks, in which micro-batches, under which schedule."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from math import gcd

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph

VERSION = 2
_AGAIN = "make the plan again: autopart.plan(model, cluster, sample=...)"
SCHEDULES = ("1f1b", "1f1b-deep", "gpipe")
"""Synchronous schedules, of the one that holds least to the one that holds most."""
ASYNC = "pipedream"
"""1F1B without a flush, with a copy of the weights for each micro-batch in flight (PipeDream, SOSP 2019)."""
ALL_SCHEDULES = (*SCHEDULES, ASYNC)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the captured ops it runs, in captured order, and the ranks that run it.

    Ops that depend on constants or inputs alone may stand in several stages; every other op stands in one.  Several
    ranks are replicas: each takes an equal share of the rows of every micro-batch, the first ones a row more where it
    does not divide, in the order of `ranks`.  recompute: groups of ops of which only the inputs are kept; a group is
    computed again when its backward comes.
    """

    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    recompute: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts for one device of a stage; times and sizes of the largest micro-batch's share.

    fwd_ns, bwd_ns: nanoseconds of one micro-batch, bwd_ns with what is recomputed.  flops: of one forward.
    param_bytes: weights and buffers.  state_bytes: gradients and optimizer state (`optimizer_bytes` of it), and weight
    versions of an asynchronous schedule.  activation_bytes: kept for each micro-batch in flight, of which there are
    at most `live`.  workspace_bytes: needed for a moment, by gradients and by what is recomputed.  buffer_bytes: for
    messages under way.  in_bytes, out_bytes: received and sent by the whole stage in one forward.  reduce_ns: sum of
    gradients over the replicas.  optimizer_ns: the optimizer's step.  peak_bytes: all that is needed at once.
    """

    fwd_ns: int
    bwd_ns: int
    flops: int
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    in_bytes: int
    out_bytes: int
    peak_bytes: int
    live: int = 1
    optimizer_bytes: int = 0
    workspace_bytes: int = 0
    buffer_bytes: int = 0
    recompute_ns: int = 0
    reduce_ns: int = 0
    optimizer_ns: int = 0


@dataclass(frozen=True, slots=True)
class Optimality:
    """How far a plan is from the best at most.  objective, lower_bound: nanoseconds of a step; for a placement of its
    worst load, in the unit of the problem.

    No plan that cuts between the planner's blocks, under the same costs, on this cluster, within the choices that were
    allowed, is simulated faster than lower_bound; one that was refined inside blocks may be, and is its own bound.
    gap: (objective - lower_bound) / objective.  proved: gap is 0.
    """

    objective: int
    lower_bound: int
    gap: float
    proved: bool

    @staticmethod
    def of(objective: int, lower_bound: int) -> Optimality:
        """From the two numbers; a bound above the objective is the objective's own."""
        low = min(objective, lower_bound)
        return Optimality(objective, low, (objective - low) / objective if objective else 0.0, low == objective)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was not taken.  step_ns: its simulated step, 0 when it cannot be; why: what speaks against it."""

    name: str
    step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete answer for one captured graph on one cluster.

    graph_digest: `Graph.shape_digest` of the graph at max(micro_rows) rows.  structure_digest: equal for the same
    model at other row counts.  micro_rows: rows of each micro-batch, in order; they differ by at most one.  step_ns:
    simulated time of one step, optimizer included (of an asynchronous schedule: in its steady state).  bubble: idle
    share of the devices in it, 0 to 1.  notes: what the planner wants said.  alternatives: what else was considered.
    """

    graph_digest: str
    structure_digest: str
    torch_version: str
    world: int
    stages: tuple[Stage, ...]
    micro_rows: tuple[int, ...]
    schedule: str
    costs: str = "analytic"
    step_ns: int = 0
    bubble: float = 0.0
    estimates: tuple[Estimate, ...] = ()
    notes: tuple[str, ...] = ()
    optimality: Optimality | None = None
    alternatives: tuple[Alternative, ...] = ()
    version: int = VERSION

    def digest(self) -> str:
        """Fingerprint of the whole plan: equal on every rank, or the ranks do not run the same thing."""
        return hashlib.sha256(json.dumps(asdict(self), separators=(",", ":")).encode()).hexdigest()[:16]

    @property
    def copies(self) -> int:
        """Pipelines side by side: replica counts have this common divisor, so rows never leave their copy."""
        return gcd(*(len(stage.ranks) for stage in self.stages))

    def stage_of_rank(self, rank: int) -> int | None:
        """The stage that a rank runs, or None for a rank that idles."""
        for index, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return index
        return None


def in_flight(schedule: str, stage: int, stages: int, micros: int) -> int:
    """Micro-batches whose activations a stage holds at most.

    All m for GPipe; min(m, S - s) for 1F1B and PipeDream; min(m, 2 (S - s) - 1) for deep 1F1B, whose longer warm-up
    hides slow messages (policies PA and PB of DAPPLE, section 3.3).
    """
    if schedule == "gpipe":
        return micros
    depth = stages - stage
    return min(micros, 2 * depth - 1 if schedule == "1f1b-deep" else depth)


def check(plan: Plan, graph: Graph | None = None) -> Plan:
    """Check a plan, and against its graph when given; return it.

    1. Version, schedule and sizes are known and positive; ranks exist and no rank runs two stages.
    2. Every op of the graph stands in at least one stage, and only ops of the graph do.
    3. No value flows from a stage to an earlier one.
    4. A recomputed group holds ops of its stage, each once.
    5. All uses of a buffer that is updated stand in the stage that updates it: each stage has its own copy.
    Raises PlanError.
    """
    if plan.version != VERSION:
        raise PlanError(f"plan version {plan.version} cannot be read", why=f"this release reads version {VERSION}")
    if plan.schedule not in ALL_SCHEDULES:
        raise PlanError(f"unknown schedule {plan.schedule!r}", fix="use one of " + ", ".join(ALL_SCHEDULES))
    if not plan.stages:
        raise PlanError("the plan has no stages")
    if not plan.micro_rows or min(plan.micro_rows) < 1:
        raise PlanError("every micro-batch needs at least one row", where=f"micro_rows {list(plan.micro_rows)}")
    used = [rank for stage in plan.stages for rank in stage.ranks]
    if len(used) != len(set(used)):
        raise PlanError("a rank runs more than one stage", where=f"ranks {used}")
    if any(not stage.ranks for stage in plan.stages):
        raise PlanError("a stage has no rank")
    if any(rank < 0 or rank >= plan.world for rank in used):
        raise PlanError(f"the plan uses a rank outside 0..{plan.world - 1}", where=f"ranks {used}")
    for s, stage in enumerate(plan.stages):
        again = [name for group in stage.recompute for name in group]
        if len(again) > len(set(again)) or not set(again) <= set(stage.ops):
            raise PlanError(f"stage {s} recomputes an op that it does not have, or one twice")
    if graph is not None:
        _check_ops(plan, graph)
    return plan


def _check_ops(plan: Plan, graph: Graph) -> None:
    where = {name: s for s, stage in reversed(list(enumerate(plan.stages))) for name in stage.ops}
    have = [set(stage.ops) for stage in plan.stages]
    names = {op.name for op in graph.ops}
    for extra in set(where) - names:
        raise PlanError(f"the plan names op {extra}, which the graph does not have", fix=_AGAIN)
    for missing in sorted(names - set(where)):
        raise PlanError(f"op {missing} of the graph stands in no stage", fix=_AGAIN)
    _check_updates(graph, have)
    writer = graph.writer()
    for op in graph.ops:
        for s, ops in enumerate(have):
            if op.name not in ops:
                continue
            for read in op.reads:
                source = writer.get(read)
                if source is not None and source not in ops and where[source] > s:
                    raise PlanError(
                        f"value {read} flows back from stage {where[source]} to stage {s}",
                        where=f"op {op.name} {op.module} {op.where}".strip(),
                    )


def _check_updates(graph: Graph, have: list[set[str]]) -> None:
    writer = graph.writer()
    for buffer, value in graph.updates:
        uses = {op.name for op in graph.ops if buffer in op.params} | {writer[value]}
        stages = [s for s, ops in enumerate(have) if not uses.isdisjoint(ops)]
        if len(stages) > 1:
            raise PlanError(
                f"buffer {buffer} is used in stages {', '.join(map(str, stages))} and updated in one of them",
                why="each stage has its own copy: another stage would read a stale one",
                fix=f"keep {', '.join(sorted(uses))} in one stage",
            )
