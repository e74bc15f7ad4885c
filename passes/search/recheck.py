"""A plan that was made before, against the question that it is to answer now: nothing of it is taken on trust.

What is decided is held against what is asked for, and what it would take is simulated again.  The lower bound and what
else was considered are not: they follow from the search alone, and nothing that runs depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Optimality, Plan, check
from autopart.passes.graph.cuts import module_span, segments
from autopart.passes.program.routing import route
from autopart.passes.search.finalize import fits, notes_of
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.estimate import estimate
from autopart.passes.simulation.stage_costs import Estimator


def check_answer(plan: Plan, graph: Graph, fine: Graph, estimator: Estimator, request: PlanRequest) -> Plan:
    """The plan, if it is one that `pipeline.build` could have given for this request.

    graph: of captured ops, checked; fine: its atoms.  estimator: over captured ops.  request: normalized.  Raises
    PlanError with what differs.  O(uses + actions * log ranks), as much as the last step of `build`.
    """
    check(plan, graph)
    differs = next(_differences(plan, graph, fine, estimator, request), None)
    if differs is not None:
        raise PlanError("the plan does not answer this question", why=differs, fix="plan anew")
    return plan


def _differences(
    plan: Plan, graph: Graph, fine: Graph, estimator: Estimator, request: PlanRequest
) -> Iterator[str]:  # one at a time: the later ones rely on what the earlier ones found
    """What is not as it was asked for, what cannot be run, and what is not as it is simulated."""
    cluster = estimator.context.cluster
    if plan.world != cluster.world:
        yield f"it is for {plan.world} devices, the cluster has {cluster.world}"
    if plan.micro_rows not in request.micro_rows:
        yield "the batch is cut into other micro-batches"
    if plan.schedule not in request.schedules:
        yield "it has another schedule"
    if request.stages not in (None, len(plan.stages)):
        yield f"it has {len(plan.stages)} stages, not {request.stages}"
    yield from _other_freedom(plan, request)
    yield from _other_places(plan, fine, request)
    program = route(plan.decision, graph)
    known = estimate(plan.decision, program, estimator)
    if not fits(plan.decision, graph, estimator):
        yield "a device has not enough memory for it"
    if (known.step_ns, known.bubble, known.estimates) != (plan.step_ns, plan.bubble, plan.estimates):
        yield "it does not take what it says"
    yield from _other_report(plan, graph, request)


def _other_freedom(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Replicas and recomputation that were not asked for, or are missing."""
    counts = tuple(len(stage.ranks) for stage in plan.stages)
    if request.replicas_of(len(counts)) not in (None, counts) or (max(counts) > 1 and not request.may_replicate):
        yield "it has other replicas"
    if any(len(stage.ranks) > 1 and stage.policy != request.policy for stage in plan.stages):
        yield "its replicas divide micro-batches otherwise"
    again = [sum(map(len, stage.recompute)) for stage in plan.stages]
    everything = [len(stage.ops) for stage in plan.stages]
    asked = {name for group in request.recomputed for name in group}
    for stage in plan.stages:
        names = {name for group in stage.recompute for name in group}
        if not names >= asked.intersection(stage.ops):
            yield "it does not recompute what was asked for"
        if names - asked and not request.may_recompute:
            yield "it recomputes what was not asked for"
    if request.token_slices not in ("auto", plan.decision.token_slices):
        yield "it cuts sequences otherwise"
    if (plan.decision.zero and not request.may_shard) or (request.zero == 1 and not plan.decision.zero):
        yield "it shares the optimizer's state otherwise"
    if plan.decision.bucket_bytes != request.bucket_bytes:
        yield "it sums gradients otherwise"
    if request.recompute == "all" and request.may_recompute and again != everything:
        yield "it does not recompute everything"


def _other_places(plan: Plan, fine: Graph, request: PlanRequest) -> Iterator[str]:
    """Cuts that are not where they must be, modules that are parted, pins that are elsewhere.

    Only atoms count: free ops stand wherever they are needed.
    """
    home = {name: s for s, stage in enumerate(plan.stages) for name in stage.ops}
    stages = [home[op.name] for op in fine.ops]
    inside: dict[int, int] = {}
    for s, segment in zip(stages, segments(fine, request.cuts), strict=True):
        if inside.setdefault(s, segment) != segment:
            yield f"stage {s} spans a cut that was asked for"
            return
    pinned = [None] * len(request.together) + list(request.pins.values())
    for paths, pin in zip(request.keep_together(), pinned, strict=True):
        low, high = module_span(fine, paths)
        own = {
            s
            for s, op in zip(stages[low:high], fine.ops[low:high], strict=True)
            if any(f"{op.module}.".startswith(f"{path}.") for path in paths)
        }
        if len(own) > 1:
            yield f"{', '.join(paths)} stand in several stages"
        elif pin is not None and own != {pin}:
            yield f"{', '.join(paths)} is not in stage {pin}"


def _other_report(plan: Plan, graph: Graph, request: PlanRequest) -> Iterator[str]:
    """Notes that the planner does not write about such a plan, and a bound that is none for its step."""
    stages = len(plan.stages)
    ours = [notes_of(plan.decision, blocks, request, graph) for blocks in (stages, stages + 1)]
    proved = request.prove_seconds > 0 and plan.notes and plan.notes[-1].startswith("CP-SAT: ")
    if (plan.notes[:-1] if proved else plan.notes) not in ours:
        yield "it has notes that are not the planner's"
    bound = plan.optimality
    if bound is None or bound != Optimality.of(plan.step_ns, bound.lower_bound):
        yield "its lower bound is not one of its step"
