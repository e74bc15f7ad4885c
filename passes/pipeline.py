"""The compiler on one screen: from a captured graph and a cluster to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopart.ir.cluster import Cluster
from autopart.ir.cluster import check as check_cluster
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.gc_pause import gc_paused
from autopart.ir.graph import Graph
from autopart.ir.graph import check as check_graph
from autopart.ir.plan import ASYNC, Optimality, Plan, Provenance
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen, nested
from autopart.passes.graph.cuts import forced_bounds, module_span
from autopart.passes.ops.cost_model import CostsAt
from autopart.passes.proof.certificate import certified, settles
from autopart.passes.proof.lower_bound import lower_bound
from autopart.passes.search.diagnostics import infeasible
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.finalize import finalize
from autopart.passes.search.layout import SMALL
from autopart.passes.search.proposals import Watch
from autopart.passes.search.search import search
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.simulation.estimate import CostContext, device_types

BLOCKS, MOST_BLOCKS = 64, 192
"""Blocks that the partition chooses from, and those that deep pipelines and refinement do."""


@dataclass(frozen=True)
class PlannerInput:
    """What a plan is for.  graph: captured, with costs.  costs_at: its costs at other rows and on other devices.
    torch_version, costs: noted in the plan."""

    graph: Graph
    costs_at: CostsAt
    torch_version: str
    costs: str = "analytic"


@gc_paused()
def build(source: PlannerInput, cluster: Cluster, request: PlanRequest, watch: Watch | None = None) -> Plan:
    """The plan with the shortest simulated step, which says how far from the best one it can be.

    Before: the graph is checked and has costs.  After: `plan.check` holds for it and the plan's program is verified;
    the plan's digests are those of `graph`, whatever its number of rows.  Raises UsageError, InfeasibleError;
    GraphError and ProgramError would be our own mistakes.
    """
    # What the user can get wrong comes first, then what capture can.
    request = request.settled()
    check_request(request, cluster)
    graph = check_graph(source.graph)
    # Free ops go first: what is cloned is not sent, so it must not look like traffic to the passes below.
    fine = check_graph(atoms(graph))
    # Then few and heavy blocks in a line, since the partition's time grows with their square.
    coarse, line = spaces = _spaces(source, fine, cluster, request)
    check_stages(request, line.chain.n)
    # The search proposes and simulates; it never sees a captured op.
    found = search(spaces, watch)
    if found.best is None:
        raise infeasible(found, line, lambda other, machines: _again(source, fine, other, machines))
    # What was chosen is costed once more over captured ops: only there are clones counted exactly.
    done = finalize(found, graph, _setting(source, cluster, request), line)
    if done is None:
        raise infeasible(replace(found, nearest=found.best), line, lambda other, machines: None)
    decision, report, verdict = done
    # The bound does not depend on what was found, so it is honest about it.
    bound = lower_bound(coarse if cluster.world <= SMALL else line)
    if watch:
        watch("bound", report.step_ns, bound)
    if request.prove_seconds > 0 and request.prove_rows in (None, max(decision.micro_rows)):
        proof = certified(verdict, request.prove_seconds)
        report = replace(report, notes=(*report.notes, proof.note(report.step_ns)))
        if settles(request, cluster):
            bound = max(bound, proof.bound_ns)
    report = replace(report, optimality=Optimality.of(report.step_ns, bound))
    return Plan(_provenance(source), decision, report)


def _setting(source: PlannerInput, cluster: Cluster, request: PlanRequest) -> CostContext:
    return CostContext(cluster, device_types(cluster), source.costs_at, request.state_factor, request.abilities.overlap)


def _provenance(source: PlannerInput) -> Provenance:
    graph = source.graph
    return Provenance(graph.shape_digest(), graph.structure_digest(), source.torch_version, source.costs)


def _spaces(
    source: PlannerInput, fine: Graph, cluster: Cluster, request: PlanRequest
) -> tuple[SearchSpace, SearchSpace]:
    """A line of few blocks and one of more, which can be cut at the same places and at others."""
    deepest = request.stages or cluster.world
    marks = tuple(sorted({place for paths in request.marks() for place in module_span(fine, paths)} - {len(fine.ops)}))
    many = check_graph(coarsen(fine, blocks=max(MOST_BLOCKS, deepest), cuts=request.cuts, also=marks))
    setting = _setting(source, cluster, request)
    most_rows = max(max(rows) for rows in request.micro_rows)

    def space(blocks: Graph) -> SearchSpace:
        line = BlockChain(blocks, source.graph, source.costs_at, most_rows)
        return SearchSpace(line, setting, request, fine, forced_bounds(blocks, fine, request.cuts))

    large = space(many)
    if len(many.ops) <= BLOCKS:
        return large, large
    ends = tuple(sorted({*large.forced, *(b for span in large.spans for b in span)} - {0, len(many.ops)}))
    coarse, many = nested(many, blocks=BLOCKS, also=ends)
    return space(coarse), space(many)


def _again(source: PlannerInput, fine: Graph, request: PlanRequest, cluster: Cluster) -> Evaluation | None:
    """Another request, for advice: its best verdict."""
    try:
        return search(_spaces(source, fine, cluster, request)).best
    except (InfeasibleError, UsageError):
        return None


def check_request(request: PlanRequest, cluster: Cluster) -> None:
    """Everything about a request that can be refused without looking at the model."""
    check_cluster(cluster)
    known = request.abilities.schedules
    if request.schedule not in ("auto", *known):
        raise UsageError(f"unknown schedule {request.schedule!r}", fix="use one of " + ", ".join(("auto", *known)))
    if request.prove_seconds > 0 and request.schedule == ASYNC:
        raise UsageError(
            f"nothing can be proved about schedule {ASYNC!r}",
            why="its steps overlap",
            fix="leave prove out or use another schedule",
        )
    for rows in request.micro_rows or ((),):
        if not rows or min(rows) < 1 or max(rows) - min(rows) > 1:
            raise UsageError(
                f"micro-batches of {list(rows)} rows cannot work", why="each needs a row, and they differ by one"
            )
    if request.stages is not None and request.stages < 1:
        raise UsageError(
            f"stages={request.stages} cannot work", fix="use at least 1, or None to let the planner choose"
        )
    if request.cuts and request.stages is not None and request.stages <= len(request.cuts):
        raise UsageError(
            f"{len(request.cuts)} cuts make {len(request.cuts) + 1} stages, but stages={request.stages} was asked for",
            fix=f"leave stages out or use at least stages={len(request.cuts) + 1}",
        )
    count = request.stages or 1
    if count > cluster.world:
        raise UsageError(
            f"{count} stages need {count} devices, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} stages or name a larger cluster",
        )
    _check_fixed(request, cluster)


def _check_fixed(request: PlanRequest, cluster: Cluster) -> None:
    """Replicas and pins against the number of stages."""
    fixed = request.replicas if isinstance(request.replicas, tuple) else None
    if fixed is not None and request.stages is not None and len(fixed) != request.stages:
        raise UsageError(
            f"{len(fixed)} numbers of replicas are given for {request.stages} stages",
            fix=f"give {request.stages} numbers, or use stages={len(fixed)}",
        )
    needed = sum(fixed) if fixed else (request.replicas if isinstance(request.replicas, int) else 1)
    if needed > cluster.world:
        raise UsageError(
            f"{needed} replicas need {needed} devices, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} replicas in all, or name a larger cluster",
        )
    if needed > (len(fixed) if fixed else 1) and not request.abilities.replicas:
        raise UsageError("replicas of a stage cannot be run yet", fix="use autopart.plan to plan with them")
    if request.recompute not in ("auto", "off") and not request.abilities.recompute:
        raise UsageError("recomputation cannot be run yet", fix='use recompute="off", or autopart.plan to plan with it')
    for path, stage in request.pins.items():
        if not 0 <= stage < (request.stages or cluster.world):
            last = (request.stages or cluster.world) - 1
            raise UsageError(
                f"{path} is pinned to stage {stage}, which does not exist",
                fix=f"stages are numbered from 0: pin it to one of 0 to {last}" if last else "pin it to stage 0",
            )


def check_stages(request: PlanRequest, blocks: int) -> None:
    """The number of stages against the number of blocks."""
    asked = request.stages or 0
    if asked > blocks:
        raise UsageError(
            f"{asked} stages asked for, but the model has only {blocks} blocks that can stand apart",
            fix=f"use at most stages={blocks}",
        )
