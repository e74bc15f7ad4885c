"""Where it is computed: which ops on which ranks, in which micro-batches, under which schedule."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from .errors import PlanError
from .graph import Graph

VERSION = 1
_AGAIN = "make the plan again: autopart.plan(model, cluster, sample=...)"
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the captured ops it runs, in captured order, and the ranks that run it.

    Ops that depend on constants or inputs alone may stand in several stages; every other op stands in one.
    """

    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts for one stage and one micro-batch of the largest size, and its peak memory."""

    fwd_ns: int
    bwd_ns: int
    flops: int
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    in_bytes: int
    out_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete answer for one captured graph on one cluster.

    graph_digest: `Graph.shape_digest` of the graph at max(micro_rows) rows.  structure_digest: equal for the same
    model at other row counts.  micro_rows: rows of each micro-batch, in order; they differ by at most one.  step_ns:
    simulated time of one step.  bubble: idle share of the devices in it, 0 to 1.  notes: what the planner wants said.
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
    version: int = VERSION

    def digest(self) -> str:
        """Fingerprint of the whole plan: equal on every rank, or the ranks do not run the same thing."""
        return hashlib.sha256(json.dumps(asdict(self), separators=(",", ":")).encode()).hexdigest()[:16]

    def stage_of_rank(self, rank: int) -> int | None:
        """The stage that a rank runs, or None for a rank that idles."""
        for index, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return index
        return None


def in_flight(schedule: str, stage: int, stages: int, micros: int) -> int:
    """Micro-batches whose activations a stage holds at most: m for GPipe, min(m, S - s) for 1F1B (DAPPLE 3.2)."""
    return micros if schedule == "gpipe" else min(micros, stages - stage)


def check(plan: Plan, graph: Graph | None = None) -> Plan:
    """Check a plan, and against its graph when given; return it.

    1. Version, schedule and sizes are known and positive; ranks exist and no rank runs two stages.
    2. Every op of the graph stands in at least one stage, and only ops of the graph do.
    3. No value flows from a stage to an earlier one.
    4. All uses of a buffer that is updated stand in the stage that updates it: each stage has its own copy.
    Raises PlanError.
    """
    if plan.version != VERSION:
        raise PlanError(f"plan version {plan.version} cannot be read", why=f"this release reads version {VERSION}")
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"unknown schedule {plan.schedule!r}", fix="use one of " + ", ".join(SCHEDULES))
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
