"""Simulate a step of a plan, action by action, without running it."""

from __future__ import annotations

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.costs.optimizer_state import narrowest_bytes, state_factor
from autopart.costs.sources import COST_SOURCES, costed
from autopart.ir.cluster import Cluster
from autopart.ir.device_kinds import DEVICE_KINDS
from autopart.ir.graph import Size
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.passes.simulation.estimate import estimate, timeline_of
from autopart.passes.simulation.slices import slice_shares
from autopart.passes.simulation.stage_costs import Estimator, device_types
from autopart.planning.derive.family import ProgramFamily, another_size
from autopart.planning.derive.token_axis import asked_slices


def simulate_plan(
    plan: Plan, captured: Captured, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options
) -> Timeline:
    """Return one step of a plan, in nanoseconds and bytes.

    captured: the program that the plan was made from.  Costs come from the source that the options name, else from that
    of the plan.  Raises as `make_plan`.
    """
    program, estimator = _estimated(plan, captured, captures, batch, cluster, options)
    return timeline_of(plan.decision, program, estimator)


def simulated_step_ns(
    plan: Plan, captured: Captured, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options
) -> int:
    """Return the nanoseconds that a step of a plan takes, or that one of an asynchronous plan takes in the long run.
    Arguments and errors: as for `simulate_plan`."""
    program, estimator = _estimated(plan, captured, captures, batch, cluster, options)
    return estimate(plan.decision, program, estimator).step_ns


def _estimated(
    plan: Plan, captured: Captured, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options
) -> tuple[Program, Estimator]:
    """Return the proven program of a plan, and what estimates its stages."""
    source = options.costs
    if source == "auto" and plan.provenance.costs in COST_SOURCES:
        source = plan.provenance.costs
    graph = costed(captured, cluster.devices[0], source).graph
    rows = max(plan.micro_rows)
    places = [(stage.division, replica) for stage in plan.stages for replica in range(len(stage.ranks))]
    sizes = {Size(rows)} | {Size(divided.part(rows, replica)) for divided, replica in places}
    other = None
    if sizes != {graph.size}:
        several = sorted((size for size in sizes if size.rows > 1), key=lambda size: size.rows)
        other = captures(batch, another_size(graph.size, several))
    factor, _ = state_factor(options.optimizer, narrowest_bytes(graph), masters=options.master_weights)
    family = ProgramFamily(captures, batch, captured, other)
    cost_model = CostModel(graph, family.twin(graph), device_types(cluster))
    slices = None
    if plan.decision.token_slices:
        recipe = asked_slices(plan.decision.token_slices, captures, batch, Size(rows)).recipe
        if recipe is not None:
            axis = recipe.axis()
            slices = slice_shares(graph, axis.tokens, axis.behind, axis.once, cluster.devices[0])
    group_ns = DEVICE_KINDS[cluster.kind].group_ns
    estimator = Estimator(cluster, cost_model, factor, overlap=True, slices=slices, group_ns=group_ns)
    return check_program(route(plan.decision, graph), plan.schedule), estimator
