"""From the plans over blocks that the search found back to captured ops: the final plan.

Only over captured ops are clones and recomputed groups counted exactly.  A plan that then needs more memory than over
blocks is evaluated once more with the difference left free, which costs it some recomputation, and queues again.

Of plans that are about as fast the one with fewer stages is chosen (`Candidate.preference`): what the simulator leaves
out (ranks that slow each other down, variation between micro-batches, a rank that fails) grows with the devices that a
micro-batch passes.

Plans are compared by their orders of computes (`simulated_ns`), which take as long as the programs that
are made of them; only the plan that is chosen is checked, becomes a program, and is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.graph import Graph, stage_modules
from autopart.ir.plan import Decision, Outlook, Stage, check_decision
from autopart.ir.program import Program
from autopart.ir.timeline import spans_text
from autopart.passes.ordering.pipeline import Pipeline, bound_ns
from autopart.passes.program.messages import prove_messages
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import edges, route, tied, with_forward_only
from autopart.passes.program.schedules import find, streams
from autopart.passes.program.stream import streaming_of
from autopart.passes.program.verify import check_program
from autopart.passes.search.diagnostics import alternatives, mib
from autopart.passes.search.evaluation import Evaluation, evaluate
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.simulation.estimate import (
    estimate,
    excess_of,
    simulated_ns,
    timeline_of,
    work_of,
)
from autopart.passes.simulation.stage_costs import Estimator, stage_contexts

LIGHT = 0.02
"""A stage with less than this part of the slowest stage's work gets a note."""
TIGHTER = 3
"""Times that a plan is evaluated again with more memory left free."""


@dataclass(frozen=True)
class Finalized:
    """A plan over captured ops that fits, with its proven program.

    evaluation: of its candidate, over blocks.  fastest_ns: step of the fastest plan that fits, which may have more
    stages.
    """

    decision: Decision
    program: Program
    outlook: Outlook
    evaluation: Evaluation
    fastest_ns: int = 0

    @property
    def step_ns(self) -> int:
        """Simulated nanoseconds of the step."""
        return self.outlook.step_ns


class _Fitting(NamedTuple):
    """A plan that fits over captured ops.

    decision, step_ns: over captured ops.  preference: the criterion by which it is chosen, less is better.
    evaluation: over blocks.
    """

    decision: Decision
    step_ns: int
    preference: float
    evaluation: Evaluation


def finalize(
    seen: Sequence[Evaluation], graph: Graph, estimator: Estimator, space: SearchSpace
) -> Finalized | Evaluation:
    """Return the preferred plan of those that also fit over captured ops; if none does, the one that lacks least.

    seen: the plans found, fastest first.  space: the blocks that were cut.  Clones make a plan slower over ops than
    over blocks, so the next plans are tried as long as their blocks promise a step that is faster, or preferred.
    O(seen * (ops + uses)), and the simulated actions of those that were tried.
    """
    queue: list[tuple[int, int, tuple[int, ...], int, Evaluation]] = [
        (evaluation.step_ns, i, (), 0, evaluation) for i, evaluation in enumerate(seen)
    ]
    heapify(queue)
    fitting: list[_Fitting] = []
    lacking: list[Evaluation] = []
    known_ns: dict[tuple[object, ...], int | None] = {}  # steps over captured ops; None where it does not fit
    learning = graph.learning_ops()
    while queue:
        step_ns, i, spare, turn, evaluation = heappop(queue)
        if fitting and (
            step_ns >= min(each.step_ns for each in fitting)
            and replace(evaluation, step_ns=step_ns).preference >= min(each.preference for each in fitting)
        ):
            continue
        over_blocks = evaluation.decision
        stages = lower_to_ops(over_blocks.stages, evaluation.space, graph)
        decision = with_forward_only(replace(over_blocks, stages=stages), learning)
        links = edges(decision, graph)
        contexts = stage_contexts(decision, links, estimator)
        estimates, excess = tuple(map(estimator.stage, contexts)), excess_of(decision, contexts, estimator)
        if max(excess) <= 0:  # first, since to simulate a long program takes longer
            own_ns = simulated_ns(decision, estimates, links, tied(decision, graph), estimator, whole=True)
            preference = replace(evaluation, step_ns=own_ns).preference
            fitting.append(_Fitting(decision, own_ns, preference, evaluation))
            known_ns[evaluation.key] = own_ns
            continue
        worst = max(range(len(excess)), key=excess.__getitem__)
        lacking.append(replace(evaluation, estimates=estimates, over_bytes=excess[worst], stage=worst))
        known_ns.setdefault(evaluation.key, None)
        if space.request.may_recompute and turn < TIGHTER:
            spare = tuple(  # of a stage that does not fit, at least the difference between ops and blocks
                max(free, each.peak_bytes - known.peak_bytes) if over > 0 else free
                for each, known, over, free in zip(
                    estimates, evaluation.estimates, excess, spare or (0,) * len(stages), strict=True
                )
            )
            again = evaluate(evaluation.space, evaluation.candidate, spare)
            if again.fits:
                heappush(queue, (again.step_ns, i, spare, turn + 1, again))
    if not fitting:
        return min(lacking, key=lambda each: each.over_bytes)
    taken = _proven(min(fitting, key=lambda each: (each.preference, each.step_ns)), graph, estimator)
    fastest = min(fitting, key=lambda each: (each.step_ns, each.preference))
    return _explained(taken, fastest, seen, known_ns, graph, space, estimator)


def _proven(plan: _Fitting, graph: Graph, estimator: Estimator) -> Finalized:
    """Return a plan with its program, which is proven to run."""
    decision = check_decision(plan.decision, graph)
    program = check_program(route(decision, graph), decision.schedule)
    if DEVICE_KINDS[estimator.cluster.kind].transport == "nccl":
        prove_messages(program)
    return Finalized(decision, program, estimate(decision, program, estimator), plan.evaluation)


def _explained(
    taken: Finalized,
    fastest: _Fitting,
    seen: Sequence[Evaluation],
    known_ns: dict[tuple[object, ...], int | None],
    graph: Graph,
    space: SearchSpace,
    estimator: Estimator,
) -> Finalized:
    """Add modules, the simulated step, notes and alternatives: those that fit over captured ops, or that were not tried
    and are slower anyway."""
    judged = [(e, known_ns[e.key]) for e in seen if e is not taken.evaluation and e.key in known_ns]
    steps = judged + [(e, e.step_ns) for e in seen if e.key not in known_ns and e.step_ns >= taken.step_ns]
    others = tuple(replace(e, step_ns=known) for e, known in steps if known is not None)
    own, its = (replace(each.evaluation, step_ns=each.step_ns) for each in (taken, fastest))
    notes = notes_of(taken.decision, space.chain.n, space.request, graph)
    if Shape.of(taken.decision).homes:
        notes = (*notes, _ranks_note(taken, estimator, space.request.shards))
    if taken.decision.order:
        notes = (*notes, _order_note(taken, estimator))
    modules = stage_modules([stage.ops for stage in taken.decision.stages], graph)
    stages = tuple(replace(s, modules=own_ones) for s, own_ones in zip(taken.decision.stages, modules, strict=True))
    outlook = replace(
        taken.outlook,
        notes=notes,
        alternatives=() if space.request.only_slices else alternatives(own, others, its),
        limits=tuple(estimator.cluster.least_memory_bytes(stage.ranks) for stage in stages),
        spans=spans_text(timeline_of(taken.decision, taken.program, estimator)),
    )
    decision = replace(taken.decision, stages=stages)
    return replace(taken, decision=decision, outlook=outlook, fastest_ns=fastest.step_ns)


def _ranks_note(taken: Finalized, estimator: Estimator, shards: int) -> str:
    """Return the note on ranks that run several stages: how many, and the memory of the fullest."""
    decision = taken.decision
    excess = excess_of(decision, stage_contexts(decision, taken.program.edges, estimator), estimator)
    worst = max(range(len(excess)), key=excess.__getitem__)
    ranks = decision.stages[worst].ranks
    fullest = f"rank {ranks[0] * shards} is the fullest"
    together = next(stages for stages in Shape.of(decision).workers if worst in stages)
    peak = mib(excess[worst] + estimator.cluster.least_memory_bytes(ranks))
    numbers = ", ".join(map(str, together))
    return f"{len(together)} stages a rank; {fullest}: {peak} at once for stages {numbers}"


def _order_note(taken: Finalized, estimator: Estimator) -> str:
    """Return the note on a searched order: how far it can be from the best one for its stages, memory aside."""
    program, decision = taken.program, taken.decision
    work = work_of(decision, taken.outlook.estimates, program.edges, program.tied, estimator)
    least_ns = bound_ns(Pipeline.of(replace(Shape.of(decision), order=()), program.edges, work))
    gap = max(0.0, 1 - least_ns / taken.step_ns) if taken.step_ns else 0.0
    return f"order searched: no order of these stages takes less than {least_ns / 1e6:.3f} ms (gap {gap:.1%})"


def lower_to_ops(over_blocks: tuple[Stage, ...], space: SearchSpace, captured: Graph) -> tuple[Stage, ...]:
    """Return stages over blocks as stages of captured ops, in captured order.

    A recomputed block takes its own copies of free ops along, but an op is recomputed once.  Requested groups are
    recomputed to the op, wherever blocks begin and end.
    """
    parts = {op.name: op.parts or (op.name,) for op in space.chain.blocks.ops}
    place = {op.name: i for i, op in enumerate(captured.ops)}
    stages = []
    for stage in over_blocks:
        ops = {part for name in stage.ops for part in parts[name]}
        seen: set[str] = set()
        groups = []
        more = [group for group in stage.recompute if group not in space.asked_of(stage.ops)]
        asked = [ops.intersection(group) for group in space.request.recomputed]
        for wanted in (*asked, *({part for name in group for part in parts[name]} for group in more)):
            fresh = wanted - seen
            seen |= fresh
            groups.append(tuple(sorted(fresh, key=place.__getitem__)))
        in_order = tuple(sorted(ops, key=place.__getitem__))
        stages.append(replace(stage, ops=in_order, recompute=tuple(filter(None, groups))))
    return tuple(stages)


def notes_of(decision: Decision, blocks: int, request: PlanRequest, graph: Graph) -> tuple[str, ...]:
    """Return notes on the plan for the user.  blocks: their number."""
    notes = []
    used = len({rank for stage in decision.stages for rank in stage.ranks})
    if used < decision.world:
        no_more_blocks = len(decision.stages) == blocks
        reason = f"the model has only {blocks} blocks" if no_more_blocks else _idle_reason(request)
        idle, every = (count * request.shards for count in (decision.world - used, decision.world))
        notes.append(f"{idle} of {every} devices idle: {reason}")
    if request.stages is not None:
        notes += _light_stages(decision, graph)
    if streams(find(decision.schedule)):
        notes += _versions(decision, graph)
    elif not find(decision.schedule).synchronous:
        notes.append("asynchronous: gradients are of older weights; its step is the steady state; it cannot be run")
    return tuple(notes)


def _versions(decision: Decision, graph: Graph) -> list[str]:
    """Return notes on the age of the weights that gradients are of, and on the versions of the weights."""
    rhythm, sizes, ops = streaming_of(decision), {p.name: p.size_bytes for p in graph.params}, graph.op_map()
    stages = range(len(decision.stages))
    own = [{name for op in stage.ops for name in ops[op].params} for stage in decision.stages]
    more = [(rhythm.versions(s) - 1) * sum(sizes[name] for name in own[s]) for s in stages]
    late = ", ".join(str(rhythm.staleness(s)) for s in stages)
    held = ", ".join(str(rhythm.versions(s)) for s in stages)
    batches = [every // rhythm.micros for every in rhythm.updates]
    found = [
        f"asynchronous: the gradients of a batch are of weights that are up to {late} updates old, by stage; the step "
        "is the steady state, without a flush",
        f"versions of the weights that the stages hold: {held}; beside the newest they take "
        f"{', '.join(f'{size / 2**20:.1f}' for size in more)} MiB",
    ]
    if max(batches) > 1:
        each = ", ".join(map(str, batches))
        found.append(f"batches in an update, by stage: {each}: replicas in turn use the mean of their gradients")
    return found


def _light_stages(decision: Decision, graph: Graph) -> list[str]:
    """Return notes on stages with hardly any work, such as the loss alone, which a fixed number of stages can force."""
    time_of = {op.name: op.cost.total_ns for op in graph.ops}
    times = [sum(time_of[name] for name in stage.ops) for stage in decision.stages]
    micros = len(decision.micro_rows)
    count = "1 micro-batch" if micros == 1 else f"{micros} micro-batches"
    return [
        f"stage {s} has {time / sum(times):.1%} of the work: with {count} no even cut is faster; fewer stages or more "
        "micro-batches use its devices better"
        for s, time in enumerate(times)
        if time < LIGHT * max(times)
    ]


def _idle_reason(request: PlanRequest) -> str:
    """Return why devices idle: the options that leave no choice, else that more devices would not help."""
    asked = []
    if request.stages is not None:
        asked.append("1 stage" if request.stages == 1 else f"{request.stages} stages")
    if isinstance(request.replicas, tuple):
        asked.append(f"{', '.join(map(str, request.replicas))} replicas")
    elif request.replicas is not None and request.may_replicate:
        asked.append(f"{request.replicas} replicas of each stage")
    if not asked:
        return "more would not make the step shorter"
    verb = "was" if asked == ["1 stage"] else "were"
    words = f"{' and '.join(asked)} {verb} asked for"
    if request.stages is None and not isinstance(request.replicas, tuple):
        return f"{words}, and more stages would not make the step shorter"
    if request.replicas is None and request.may_replicate:
        return f"{words}, and more replicas would not make the step shorter"
    return words
