"""The compiler on one screen: from a captured graph and a cluster to a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autopart.ir.cluster import Cluster
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.graph import check as check_graph
from autopart.ir.plan import Outlook, Plan, Provenance
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import nested
from autopart.passes.graph.cuts import check_own_ops, forced_bounds
from autopart.passes.ops.cost_model import OpCosts
from autopart.passes.proof.certificate import certified, settles
from autopart.passes.proof.lower_bound import least_of, require_hope, slices_bound
from autopart.passes.search.diagnostics import check_times, infeasible_error
from autopart.passes.search.evaluation import Evaluation, Search
from autopart.passes.search.finalize import Finalized, finalize
from autopart.passes.search.proposals import falls_behind, proposals_of
from autopart.passes.search.requests import check_request, check_stages
from autopart.passes.search.search import evaluate_all, evaluate_promising
from autopart.passes.search.space import PlanRequest, SearchSpace, Watch, blocks_of
from autopart.passes.search.variants import variants
from autopart.passes.simulation.slices import slice_shares
from autopart.passes.simulation.stage_costs import Estimator

BLOCKS, MOST_BLOCKS = 64, 192
"""Blocks that the partition chooses from, and those that deep pipelines and refinement choose from."""
TIGHTER = 2
"""Searches with less memory, if no plan that fits over blocks fits over captured ops."""
LARGEST = 1024
"""Blocks that deep pipelines on very many devices choose from; tables grow with their square."""

Spaces = tuple[SearchSpace, SearchSpace]
"""The coarse space, of few blocks, and the fine one, of more; one space twice for small models."""


@dataclass(frozen=True)
class PlannerInput:
    """The captured model and its costs.

    graph: captured, with costs.  cost_model: its costs at other sizes and on other devices.  torch_version, costs:
    recorded in the plan.  group_ns: overhead of a recomputed group (`DeviceKind`).  exchange_ns: `SliceShares` has it.
    """

    graph: Graph
    cost_model: OpCosts
    torch_version: str
    costs: str = "analytic"
    group_ns: int = 0
    exchange_ns: dict[str, tuple[int, int]] = field(default_factory=dict)


def build(source: PlannerInput, cluster: Cluster, request: PlanRequest, watch: Watch | None = None) -> Plan:
    """Return the plan with the shortest simulated step, or one about as fast with fewer stages
    (`Candidate.preference`), with a bound on its distance from the best one.

    Before: the graph is checked and has costs.  After: the plan's decision is checked and its program is verified; the
    plan's digests are those of `graph`, whatever its number of rows.  Raises UsageError, InfeasibleError; GraphError
    and ProgramError would be errors of the planner itself.
    """
    # Errors of the user come first, then those of capture.
    asked, request = request, request.normalized()
    check_request(request, cluster)
    graph = check_graph(source.graph)
    check_times(graph, cluster)
    # Captured ops to atoms: clones are not sent, so they must not look like traffic to the passes below.
    fine = check_graph(atoms(graph))
    # Atoms to chains of few and heavy blocks, since the partition's time grows with their square.
    estimator = _estimator(source, cluster, request)
    spaces = _spaces(source, fine, estimator, request)
    check_stages(request, spaces[1].chain.n)
    require_hope(spaces)

    def again(other: PlanRequest, machines: Cluster) -> Evaluation | None:
        """Plan under another request, for advice."""
        try:
            other = other.normalized()
            check_request(other, machines)
            found = _spaces(source, fine, _estimator(source, machines, other), other)
            final = _chosen(source, fine, graph, machines, other, search(found), found)
        except (InfeasibleError, UsageError):
            return None
        return final.evaluation if isinstance(final, Finalized) else None

    # Chains to evaluated candidates; no captured op is looked at on the way.
    found = search(spaces, watch)
    if not found.seen:
        raise infeasible_error(found.nearest, replace(spaces[1], request=asked), again)
    # The best of them to captured ops, over which it is costed once more: only there are clones counted exactly.
    final = _chosen(source, fine, graph, cluster, request, found, spaces, watch)
    if not isinstance(final, Finalized):
        raise infeasible_error(final, replace(spaces[1], request=asked), lambda other, machines: None)
    # The proof does not depend on the search, so that it cannot repeat its errors.
    outlook = _with_bounds(final, spaces, watch, orders=found.other_orders)
    digests = graph.shape_digest(), graph.structure_digest()
    return Plan(Provenance(*digests, source.torch_version, source.costs), final.decision, outlook)


def _chosen(
    source: PlannerInput,
    fine: Graph,
    graph: Graph,
    cluster: Cluster,
    request: PlanRequest,
    found: Search,
    spaces: Spaces,
    watch: Watch | None = None,
) -> Finalized | Evaluation | None:
    """Return the preferred plan that a search found and that fits over captured ops; else the one that lacks least."""
    if not found.seen:
        return found.nearest
    final, spare = finalize(found.seen, graph, _estimator(source, cluster, request), spaces[1]), 0
    for _ in range(TIGHTER):
        if isinstance(final, Finalized):
            break
        # The blocks of every plan needed less memory than its ops: search plans for devices with that much less.
        spare += final.over_bytes
        less_memory = _estimator(source, cluster.with_less_memory(spare), request)
        tighter = _spaces(source, fine, less_memory, request)
        seen = search(tighter, watch).seen
        if not seen:
            break
        final = finalize(seen, graph, _estimator(source, cluster, request), tighter[1])
    return final


def search(spaces: Spaces, watch: Watch | None = None) -> Search:
    """Search for the fastest candidates (`search.search` describes the steps)."""
    found = Search(*spaces, watch)
    # Small spaces completely.
    complete = evaluate_all(found)
    if not complete:
        # Chains to partitions by dynamic programs, and the promising ones to simulated steps.
        found.proposals = proposals_of(found)
        evaluate_promising(found)
        if falls_behind(found):
            return found
        if not found.fitting:  # none of the good ones fits: others may
            found.proposals = proposals_of(found, worth=math.inf) or proposals_of(found, ignore_memory=True)
            evaluate_promising(found)
    # The best of these to other plans.
    for variant in variants.VARIANTS:
        if variant.leaves_family or not complete:
            variant.evaluate(found, variant.effort)
    found.keep_asked()
    return found


def _with_bounds(final: Finalized, spaces: Spaces, watch: Watch | None, *, orders: bool) -> Outlook:
    """Return the outlook with a lower bound on any plan, and with a certificate if one is requested.

    orders: whether plans with split backwards or several stages a rank were allowed.
    """
    coarse, outlook = spaces[0], final.outlook
    request, cluster = coarse.request, coarse.costs.cluster
    bound_ns = least_of(spaces, orders=orders)
    if watch:
        watch("bound", outlook.step_ns, bound_ns)
    if request.token_slices:  # slices of attention leave out masked scores, and so take less than whole sequences
        sliced_ns = slices_bound(coarse)
        bound_ns = sliced_ns if request.fixed_slices else min(bound_ns, sliced_ns)
        return outlook.with_bound(bound_ns)
    if request.prove_seconds > 0 and request.prove_rows in (None, max(final.decision.micro_rows)):
        certificate = certified(final.evaluation, request.prove_seconds)
        outlook = replace(outlook, notes=(*outlook.notes, certificate.note(outlook.step_ns)))
        if settles(request, cluster):
            bound_ns = max(bound_ns, certificate.bound_ns)
    # A plan chosen for its fewer stages must not claim a bound above the faster plan that was found.
    return outlook.with_bound(min(bound_ns, final.fastest_ns))


def _estimator(source: PlannerInput, cluster: Cluster, request: PlanRequest) -> Estimator:
    """Return the estimator over captured ops."""
    axis, slices = request.token_axis, None
    if axis is not None:
        slices = slice_shares(source.graph, axis, cluster.devices[0], source.exchange_ns)
    return Estimator(
        cluster, source.cost_model, request.state_factor, overlap=True, slices=slices, group_ns=source.group_ns
    )


def _spaces(source: PlannerInput, fine: Graph, estimator: Estimator, request: PlanRequest) -> Spaces:
    """Return a space of few blocks and one of more, which can be cut at the same places and at others.

    estimator: over captured ops.
    """
    together = [path for paths in request.keep_together() for path in paths]
    check_own_ops(source.graph, fine, [*request.cuts, *together])
    most_blocks = max(MOST_BLOCKS, request.stages or 0, min(estimator.cluster.world * request.shards, LARGEST))
    many = check_graph(blocks_of(fine, request, most_blocks))
    chain = BlockChain(many, source.graph, source.cost_model)
    whole = SearchSpace(chain, estimator.over(chain), request, fine, forced_bounds(many, fine, request.cuts))
    if len(many.ops) <= BLOCKS:
        return whole, whole
    spans = {boundary for span in whole.spans for boundary in span}
    kept = tuple(sorted({*whole.forced, *spans} - {0, len(many.ops)}))
    few, many = nested(many, blocks=BLOCKS, also=kept)
    return whole.over(few), whole.over(many)
