"""The compiler on one screen: from a captured graph and a cluster to a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopart.ir.cluster import Cluster
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.graph import check as check_graph
from autopart.ir.plan import Plan, Provenance, Report
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen, nested
from autopart.passes.graph.cuts import check_own_ops, forced_bounds, module_span
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.proof.certificate import certified, settles
from autopart.passes.proof.lower_bound import lower_bound, slices_bound
from autopart.passes.search.diagnostics import check_times, infeasible_error
from autopart.passes.search.evaluation import Evaluation, Search, SearchResult
from autopart.passes.search.finalize import Finalized, finalize
from autopart.passes.search.layout import SMALL
from autopart.passes.search.proposals import proposals_of
from autopart.passes.search.requests import check_request, check_stages
from autopart.passes.search.search import (
    evaluate_all,
    evaluate_for_comparison,
    evaluate_promising,
    evaluate_variants,
    refine_best,
)
from autopart.passes.search.slicing import evaluate_slices
from autopart.passes.search.space import PlanRequest, SearchSpace, SearchSpaces, Watch
from autopart.passes.simulation.slices import SliceShares
from autopart.passes.simulation.stage_costs import CostContext, Estimator, LoadMemo, device_types

BLOCKS, MOST_BLOCKS = 64, 192
"""Blocks that the partition chooses from, and those that deep pipelines and refinement choose from."""
TIGHTER = 2
"""Searches with less memory, where none of the plans that fit over blocks does over captured ops."""
LARGEST = 1024
"""Blocks that deep pipelines on very many devices choose from, and which of them to recompute: tables grow with their
square."""


@dataclass(frozen=True)
class PlannerInput:
    """What a plan is for.

    graph: captured, with costs.  cost_model: its costs at other sizes and on other devices.  torch_version, costs:
    noted in the plan.  group_ns: what a recomputed group takes beside its ops (`costs.GROUP_NS`).
    """

    graph: Graph
    cost_model: CostModel
    torch_version: str
    costs: str = "analytic"
    group_ns: int = 0


def build(source: PlannerInput, cluster: Cluster, request: PlanRequest, watch: Watch | None = None) -> Plan:
    """The plan with the shortest simulated step, or one about as fast with fewer stages (`evaluation.preference`),
    which says how far from the best one it can be.

    Before: the graph is checked and has costs.  After: the plan's decision is checked and its program is verified; the
    plan's digests are those of `graph`, whatever its number of rows.  Raises UsageError, InfeasibleError; GraphError
    and ProgramError would be our own mistakes.
    """
    # What the user can get wrong comes first, then what capture can.
    request = request.normalized()
    check_request(request, cluster)
    graph = check_graph(source.graph)
    check_times(graph, cluster)
    # Captured ops to atoms: what is cloned is not sent, so it must not look like traffic to the passes below.
    fine = check_graph(atoms(graph))
    # Atoms to chains of few and heavy blocks, since the partition's time grows with their square.
    spaces = _spaces(source, fine, cluster, request)
    check_stages(request, spaces.fine.chain.n)
    # Chains to evaluated candidates; no captured op is looked at on the way.
    found = search(spaces, watch)
    if found.best is None:
        raise infeasible_error(found, spaces.fine, lambda other, machines: _again(source, fine, other, machines))
    # The best of them to captured ops, over which it is costed once more: only there are clones counted exactly.
    estimator = Estimator(_costs(source, cluster, request))
    final, spare = finalize(found, graph, estimator, spaces.fine), 0
    for _ in range(TIGHTER):
        if isinstance(final, Finalized):
            break
        # Every plan was promised too much memory by its blocks: plans for devices with so much less of it.
        spare += final.over_bytes
        tighter = _spaces(source, fine, cluster.with_less_memory(spare), request)
        found = search(tighter, watch)
        if found.best is None:
            break
        final = finalize(found, graph, estimator, tighter.fine)
    if isinstance(final, Evaluation):
        raise infeasible_error(replace(found, nearest=final), spaces.fine, lambda other, machines: None)
    # What is proved does not depend on what was found, so it is honest about it.
    report = _with_bounds(final, spaces, watch)
    return Plan(_provenance(source), final.decision, report)


def search(spaces: SearchSpaces, watch: Watch | None = None) -> SearchResult:
    """The fastest candidate found (`search.search` says how it is looked for)."""
    found = Search(spaces, watch)
    # Small spaces whole.
    if evaluate_all(found):
        evaluate_slices(found)
        return found.result()
    # Chains to partitions by dynamic programs, and the promising ones to simulated steps.
    proposals = proposals_of(found)
    evaluate_promising(found, proposals)
    if not found.fitting:  # none of the good ones does: others may
        proposals = proposals_of(found, worth=math.inf) or proposals_of(found, ignore_memory=True)
        evaluate_promising(found, proposals)
    if not proposals:  # the model cannot be cut as it was asked for
        return found.result()
    # The best of these to other schedules, layouts and cuts.
    evaluate_variants(found)
    evaluate_for_comparison(found, proposals)
    refine_best(found)
    # Of the best that there is for whole sequences, what slices of them would gain.
    evaluate_slices(found)
    return found.result()


def _with_bounds(final: Finalized, spaces: SearchSpaces, watch: Watch | None) -> Report:
    """The report, with what no plan can be faster than, and with a certificate where one is asked for."""
    request, cluster, report = spaces.coarse.request, spaces.coarse.costs.cluster, final.report
    bound_ns = lower_bound(spaces.coarse if cluster.world <= SMALL else spaces.fine)
    if watch:
        watch("bound", report.step_ns, bound_ns)
    if request.token_slices:  # slices of attention leave out what masks hide, and so take less than whole sequences
        sliced_ns = slices_bound(spaces.coarse)
        bound_ns = sliced_ns if request.fixed_slices else min(bound_ns, sliced_ns)
        return report.with_bound(bound_ns)
    if request.prove_seconds > 0 and request.prove_rows in (None, max(final.decision.micro_rows)):
        certificate = certified(final.evaluation, request.prove_seconds)
        report = replace(report, notes=(*report.notes, certificate.note(report.step_ns)))
        if settles(request, cluster):
            bound_ns = max(bound_ns, certificate.bound_ns)
    # Where a plan was taken for its fewer stages, nothing is said of the faster one that the faster one contradicts.
    return report.with_bound(min(bound_ns, final.fastest_ns))


def _provenance(source: PlannerInput) -> Provenance:
    graph = source.graph
    return Provenance(graph.shape_digest(), graph.structure_digest(), source.torch_version, source.costs)


def _costs(source: PlannerInput, cluster: Cluster, request: PlanRequest) -> CostContext:
    axis, slices = request.token_axis, None
    if axis is not None:
        slices = SliceShares.of(source.graph, axis.tokens, axis.behind, axis.once, cluster.devices[0])
    return CostContext(
        cluster,
        device_types(cluster),
        source.cost_model,
        request.state_factor,
        overlap=True,
        slices=slices,
        group_ns=source.group_ns,
    )


def _spaces(source: PlannerInput, fine: Graph, cluster: Cluster, request: PlanRequest) -> SearchSpaces:
    """A chain of few blocks and one of more, which can be cut at the same places and at others."""
    together = [path for paths in request.keep_together() for path in paths]
    check_own_ops(source.graph, fine, [*request.cuts, *together])
    ends = {place for paths in request.keep_together() for place in module_span(fine, paths)} - {len(fine.ops)}
    most_blocks = max(MOST_BLOCKS, request.stages or 0, min(cluster.world, LARGEST))
    many = check_graph(coarsen(fine, blocks=most_blocks, cuts=request.cuts, also=tuple(sorted(ends))))
    costs, loads = _costs(source, cluster, request), LoadMemo(cluster)
    most_rows = max(max(rows) for rows in request.micro_rows)

    def space(blocks: Graph) -> SearchSpace:
        chain = BlockChain(blocks, source.graph, source.cost_model, most_rows)
        return SearchSpace(chain, costs, loads, request, fine, forced_bounds(blocks, fine, request.cuts))

    whole = space(many)
    if len(many.ops) <= BLOCKS:
        return SearchSpaces(whole, whole)
    spans = {boundary for span in whole.spans for boundary in span}
    kept = tuple(sorted({*whole.forced, *spans} - {0, len(many.ops)}))
    few, many = nested(many, blocks=BLOCKS, also=kept)
    return SearchSpaces(coarse=space(few), fine=space(many))


def _again(source: PlannerInput, fine: Graph, request: PlanRequest, cluster: Cluster) -> Evaluation | None:
    """Another request, for advice: its best evaluation."""
    try:
        return search(_spaces(source, fine, cluster, request)).best
    except (InfeasibleError, UsageError):
        return None
