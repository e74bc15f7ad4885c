"""What it takes to simulate a step of a plan, without running it."""

from __future__ import annotations

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.costs.optimizer_state import narrowest_bytes, state_factor
from autopart.costs.sources import COST_SOURCES, costed
from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Size
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.options import Options
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.passes.simulation.slices import slice_shares
from autopart.passes.simulation.stage_costs import Estimator, device_types
from autopart.planning.derive.family import ProgramFamily, another_size
from autopart.planning.derive.token_axis import asked_slices


def estimated_plan(
    plan: Plan, captured: Captured, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options
) -> tuple[Program, Estimator]:
    """Return the proven program of a plan, and what estimates its stages in nanoseconds and bytes.

    `timeline_of` plays one step of it, and `estimate` tells what a step takes, of an asynchronous plan in the long run.
    captured: the program that the plan was made from.  Costs come from the source that the options name, else from that
    of the plan.  Raises as `make_plan`.
    """
    if plan.decision.shards > 1:
        raise RefusedError(
            "a plan with tensor parallelism is simulated when it is made, not once more",
            fix="look at plan.outlook, or plan again with tensor_parallel=",
        )
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
