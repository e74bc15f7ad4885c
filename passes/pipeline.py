"""The compiler on one screen: from a captured graph and a cluster to a plan."""

from __future__ import annotations

from itertools import pairwise

from autopart.ir.cluster import Cluster
from autopart.ir.cluster import check as check_cluster
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.graph import check as check_graph
from autopart.ir.plan import SCHEDULES, Plan, Stage
from autopart.ir.plan import check as check_plan
from autopart.passes.atoms import atoms
from autopart.passes.coarsen import coarsen
from autopart.passes.cuts import forced_bounds
from autopart.passes.estimate import estimate
from autopart.passes.partition import Split, partition
from autopart.passes.route import route
from autopart.passes.verify import verify

BLOCKS = 64
"""Blocks that the partition chooses from, when four for each stage are not more."""


def build(
    graph: Graph,
    cluster: Cluster,
    *,
    stages: int | None,
    micro_rows: tuple[int, ...],
    schedule: str,
    cuts: tuple[str, ...] = (),
    torch_version: str,
    costs: str = "analytic",
    state_factor: float = 2.0,
) -> Plan:
    """The plan with the shortest simulated step: which captured ops on which rank, under which schedule.

    Before: graph is captured at max(micro_rows) rows and has costs.  stages: None for one on each device, or what
    `cuts` (module paths at which a stage begins) say.  schedule: "auto", "1f1b" or "gpipe".  state_factor: bytes of
    optimizer state per byte of trainable parameter.  After: `plan.check(plan, graph)` holds and the plan's program is
    verified.  Raises UsageError, InfeasibleError; GraphError and ProgramError would be our own mistakes.
    """
    # What the user can get wrong comes first, then what capture can.
    _check_options(stages, micro_rows, schedule, cuts, cluster)
    check_graph(graph)
    # Free ops go first: what is cloned is not sent, so it must not look like traffic to the passes below.
    fine = check_graph(atoms(graph))
    # Then few and heavy blocks in a line, since the partition's time grows with their square.
    most = stages or (len(cuts) + 1 if cuts else cluster.world)
    blocks = check_graph(coarsen(fine, blocks=max(BLOCKS, 4 * most), cuts=cuts))
    # Only now it is known how many stages there can be.
    count = _stage_count(most, stages, cuts, len(blocks.ops))
    forced = forced_bounds(blocks, fine, cuts)
    # Each schedule gets its own partition, because their memory differs; only a simulation compares them.
    plans: list[Plan] = []
    problem: InfeasibleError | None = None
    micros = len(micro_rows)
    for name in SCHEDULES if schedule == "auto" else (schedule,):
        try:
            split = partition(
                blocks, cluster, stages=count, micros=micros, schedule=name, forced=forced, state_factor=state_factor
            )
        except InfeasibleError as error:
            problem = problem or error
            continue
        plan = Plan(
            graph_digest=graph.shape_digest(),
            structure_digest=graph.structure_digest(),
            torch_version=torch_version,
            world=cluster.world,
            stages=_stages(split, blocks, graph),
            micro_rows=micro_rows,
            schedule=name,
            costs=costs,
            notes=_notes(count, cluster.world, len(blocks.ops)),
        )
        # The program is proven before anything is believed about its time.
        program = verify(route(check_plan(plan, graph), graph), name)
        plans.append(estimate(plan, graph, program, cluster, state_factor=state_factor))
    if problem is not None and not plans:
        raise problem
    # The first of the fastest: 1f1b wins a tie, because it holds less memory.
    return min(plans, key=lambda plan: plan.step_ns)


def _check_options(
    stages: int | None, micro_rows: tuple[int, ...], schedule: str, cuts: tuple[str, ...], cluster: Cluster
) -> None:
    check_cluster(cluster)
    if schedule not in ("auto", *SCHEDULES):
        raise UsageError(f"unknown schedule {schedule!r}", fix="use one of " + ", ".join(("auto", *SCHEDULES)))
    if not micro_rows or min(micro_rows) < 1 or max(micro_rows) - min(micro_rows) > 1:
        raise UsageError(
            f"micro-batches of {list(micro_rows)} rows cannot work", why="each needs a row, and they differ by one"
        )
    if stages is not None and stages < 1:
        raise UsageError(f"stages={stages} cannot work", fix="use at least 1, or None for one on each device")
    if cuts and stages not in (None, len(cuts) + 1):
        raise UsageError(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, but stages={stages} was asked for",
            fix=f"leave stages out or use stages={len(cuts) + 1}",
        )
    count = stages or len(cuts) + 1
    if count > cluster.world:
        raise UsageError(
            f"{count} stages need {count} devices, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} stages or name a larger cluster",
        )


def _stage_count(most: int, stages: int | None, cuts: tuple[str, ...], blocks: int) -> int:
    """As many stages as asked for; unasked, no more than there are blocks."""
    if (stages is not None or cuts) and most > blocks:
        raise UsageError(
            f"{most} stages asked for, but the model has only {blocks} blocks that can stand apart",
            fix=f"use at most stages={blocks}",
        )
    return min(most, blocks)


def _stages(split: Split, blocks: Graph, graph: Graph) -> tuple[Stage, ...]:
    """Captured ops of each stage in captured order; stage s runs on rank s."""
    place = {op.name: i for i, op in enumerate(graph.ops)}
    stages = []
    for s, (a, b) in enumerate(pairwise(split.bounds)):
        parts = {part for block in blocks.ops[a:b] for part in block.parts}
        stages.append(Stage(tuple(sorted(parts, key=place.__getitem__)), (s,)))
    return tuple(stages)


def _notes(count: int, world: int, blocks: int) -> tuple[str, ...]:
    if count == world:
        return ()
    reason = f"the model has only {blocks} blocks" if count == blocks else f"{count} stages were asked for"
    return (f"{world - count} of {world} devices idle: {reason}",)
