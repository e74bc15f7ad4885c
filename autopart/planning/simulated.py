"""What it takes to simulate a step of a plan, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.costs.optimizer_state import narrowest_bytes, state_factor
from autopart.costs.sources import COST_SOURCES, costed
from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.decision import Decision
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.passes.ops.cost_model import CostModel, OpCosts
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.passes.shards.costs import GroupCosts, grouped, of_groups
from autopart.passes.simulation.slices import slice_shares
from autopart.passes.simulation.stage_costs import Estimator, device_types
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.family import ProgramFamily, another_size
from autopart.planning.derive.sliced_shards import choice_for
from autopart.planning.derive.token_axis import asked_slices


def estimated_plan(
    plan: Plan, captured: Captured, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options
) -> tuple[Decision, Program, Estimator]:
    """Return the decision of a plan, its proven program, and what estimates its stages in nanoseconds and bytes.  With
    tensor parallelism they are those of groups of ranks, each of which computes as one device.

    `timeline_of` plays one step of it, and `estimate` tells what a step takes, of an asynchronous plan in the long run.
    captured: the program that the plan was made from.  Costs come from the source that the options name, else from that
    of the plan.  Raises as `make_plan`, and as `of_groups`.
    """
    source = options.costs
    if source == "auto" and plan.provenance.costs in COST_SOURCES:
        source = plan.provenance.costs
    graph = costed(captured, cluster.devices[0], source).graph
    decision, shards = plan.decision, plan.decision.shards
    decision = of_groups(decision) if shards > 1 else decision
    rows = max(plan.micro_rows)
    places = [(stage.division, replica) for stage in decision.stages for replica in range(len(stage.ranks))]
    sizes = {Size(rows)} | {Size(divided.part(rows, replica)) for divided, replica in places}
    other = None
    if sizes != {graph.size}:
        several = sorted((size for size in sizes if size.rows > 1), key=lambda size: size.rows)
        other = captures(batch, another_size(graph.size, several))
    factor, _ = state_factor(options.optimizer, narrowest_bytes(graph), masters=options.master_weights)
    family = ProgramFamily(captures, batch, captured, other)
    cost_model: OpCosts = CostModel(graph, family.twin(graph), device_types(cluster))
    recipe = asked_slices(decision.token_slices or None, captures, batch, Size(rows)).recipe
    exchange_ns: Mapping[str, tuple[int, int]] = {}
    if shards > 1:
        costs = cost_model = group_costs(cost_model, captured.graph, cluster, plan.decision, recipe)
        graph, cluster, exchange_ns = costs.graph(graph.size, 0), grouped(cluster, shards), costs.exchange_ns()
    slices = None if recipe is None else slice_shares(graph, recipe.axis(), cluster.devices[0], exchange_ns)
    group_ns = DEVICE_KINDS[cluster.kind].group_ns
    estimator = Estimator(cluster, cost_model, factor, overlap=True, slices=slices, group_ns=group_ns)
    return decision, check_program(route(decision, graph), plan.schedule), estimator


def of_every_rank(step: Timeline, shards: int) -> Timeline:
    """Return the timeline of the ranks, from that of groups of `shards` ranks which compute as one device.

    Ranks of a group do the same at the same time: a compute with the exchanges inside of it, and messages of their own
    parts, whose sizes are those of one rank already (`GroupCosts.graph`).  O(spans * shards).
    """
    spans = [
        replace(span, rank=rank) for span in step.spans for rank in range(span.rank * shards, (span.rank + 1) * shards)
    ]
    spans.sort(key=lambda span: (span.start_ns, span.rank))
    return Timeline(tuple(spans), tuple([size for size in step.peak_bytes for _ in range(shards)]))


def group_costs(
    whole: OpCosts, graph: Graph, cluster: Cluster, decision: Decision, recipe: Recipe | None
) -> GroupCosts:
    """Return what the ranks of a group take under a decision.  whole: what one takes that computes everything."""
    return GroupCosts(whole, graph, choice_for(graph, decision.shards, recipe, decision.token_slices), cluster)
