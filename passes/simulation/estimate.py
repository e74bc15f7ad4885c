"""Estimates of a whole decision: time, memory and messages of each stage, and the simulated step."""

from __future__ import annotations

from autopart.ir.plan import Decision, Estimate, Report
from autopart.ir.program import BACKWARD, FORWARD, Edge, Program
from autopart.ir.size import Size
from autopart.ir.timeline import Timeline
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import find, in_flight, pattern
from autopart.passes.simulation.play import Message, Work
from autopart.passes.simulation.simulate import ordered_ns, simulate, step_ns
from autopart.passes.simulation.stage_costs import Estimator, GraphIndex, StageContext

Estimates = tuple[Estimate, ...]
"""Of each stage, in order."""

LONG = 20_000
"""Actions of a program from which on candidates are judged by a shorter one."""


def estimate(decision: Decision, program: Program, estimator: Estimator) -> Report:
    """`estimates` (bytes and nanoseconds), `step_ns` and `bubble` (a fraction) of a decision.

    Before: program is the decision's, verified.  step_ns of an asynchronous schedule is micro-batches times the
    slowest stage, its steady state (PipeDream, section 3.1).  bubble: idle share of the ranks that run a stage; the
    sums of gradients and the optimizer count as idle.  O(uses + actions).
    """
    estimates = stage_estimates(decision, program.edges, estimator)
    if not find(decision.schedule).synchronous:
        return Report(steady_ns(decision, estimates), 0.0, estimates)
    step = step_ns(program, work_of(decision, estimates, program, estimator))
    busy = program.micros * sum(e.fwd_ns + e.bwd_ns for e in estimates)
    whole = step * len(decision.stages)
    return Report(step, max(0.0, 1 - busy / whole) if whole else 0.0, estimates)


def stage_estimates(decision: Decision, links: tuple[Edge, ...], estimator: Estimator) -> Estimates:
    """The estimate of each stage (bytes and nanoseconds); links: its edges (`routing.edges`).  O(uses)."""
    sizes = message_bytes(links, estimator.graph(Size(max(decision.micro_rows)), 0))
    return tuple([estimator.stage(context) for context in stage_contexts(decision, sizes)])


def simulated_ns(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], shared: Tied, estimator: Estimator
) -> int:
    """Nanoseconds of the step.  estimates: of its stages.  links, shared: edges and tied parameters (`routing`).

    Of a long program two short ones are played instead (`played`); the other micro-batches follow at the same pace.
    """
    stages, micros = len(decision.stages), len(decision.micro_rows)
    if not find(decision.schedule).synchronous:
        return steady_ns(decision, estimates)
    schedule, ranks = find(decision.schedule), [stage.ranks for stage in decision.stages]
    work = _work(decision, estimates, links, shared, estimator)
    counts = played(stages, micros, decision.schedule)
    times = [ordered_ns(pattern(schedule, stages, count), links, shared, ranks, work) for count in counts]
    if len(counts) == 1:
        return times[0]
    return times[1] + (times[1] - times[0]) * (micros - counts[1]) // (counts[1] - counts[0])


def played(stages: int, micros: int, schedule: str) -> tuple[int, ...]:
    """Numbers of micro-batches that are played to know the step.

    All of them, or of a long program as many as fill the pipeline (`Schedule.warm_up`), after which it goes at an even
    pace, and twice as many.
    """
    full = stages * find(schedule).warm_up
    return (full, 2 * full) if full and 6 * stages * micros > LONG and 3 * full < micros else (micros,)


def steady_ns(decision: Decision, estimates: Estimates) -> int:
    """Nanoseconds of all micro-batches when nothing is flushed: the slowest stage sets the pace, its replicas take
    turns."""
    return len(decision.micro_rows) * max(e.fwd_ns + e.bwd_ns + e.reduce_ns + e.optimizer_ns for e in estimates)


def timeline_of(decision: Decision, program: Program, estimator: Estimator) -> Timeline:
    """The simulated step of a decision, in nanoseconds and bytes."""
    estimates = stage_estimates(decision, program.edges, estimator)
    return simulate(program, work_of(decision, estimates, program, estimator))


def message_bytes(links: tuple[Edge, ...], index: GraphIndex) -> dict[Message, int]:
    """Bytes of one message by source stage, destination stage and way.  O(values of edges)."""
    size = index.values
    sizes = {(e.src, e.dst, FORWARD): sum([size[v] for v in e.values]) for e in links}
    return sizes | {(e.dst, e.src, BACKWARD): sum([size[v] for v in e.grads]) for e in links if e.grads}


def work_of(decision: Decision, estimates: Estimates, program: Program, estimator: Estimator) -> Work:
    """What the simulator needs, in nanoseconds and bytes.  estimates: of the stages."""
    return _work(decision, estimates, program.edges, program.tied, estimator)


def _work(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], shared: Tied, estimator: Estimator
) -> Work:
    ranks, loads = [stage.ranks for stage in decision.stages], estimator.loads
    index = estimator.graph(Size(max(decision.micro_rows)), 0)
    trained = [(index.trained_bytes(stage), stage.ranks) for stage in decision.stages]
    return Work(
        fwd_ns=tuple(e.fwd_ns for e in estimates),
        bwd_ns=tuple(e.bwd_ns for e in estimates),
        held_bytes=tuple(e.activation_bytes for e in estimates),
        messages={
            (src, dst, way): (size, loads.p2p(ranks[src], ranks[dst]))
            for (src, dst, way), size in message_bytes(links, index).items()
        },
        tied=tuple(
            (users, index.params[name], loads.ring_allreduce(tuple(dict.fromkeys(ranks[stage][0] for stage in users))))
            for name, users in shared
        ),
        reduce=tuple((size, loads.ring(ranks, 1 if decision.zero else 2)) for size, ranks in trained),
        gather=tuple((size, loads.ring(ranks, 1)) for size, ranks in trained) if decision.zero else (),
        optimizer_ns=tuple(e.optimizer_ns for e in estimates),
        overlap=estimator.context.overlap,
    )


def stage_contexts(decision: Decision, sizes: dict[Message, int]) -> list[StageContext]:
    """What the estimate of each stage depends on.  sizes: of its messages.  O(stages + edges)."""
    into, out, back = ([0] * len(decision.stages) for _ in range(3))
    for (src, dst, way), size in sizes.items():
        if way == FORWARD:
            into[dst] += size
            out[src] += size
        else:
            back[src] += size
            back[dst] += size
    rows, micros = max(decision.micro_rows), len(decision.micro_rows)
    schedule, found = find(decision.schedule), []
    for s, stage in enumerate(decision.stages):
        live = in_flight(schedule, s, len(decision.stages), micros)
        versions = 1 if schedule.synchronous else live
        found.append(
            StageContext(
                stage, rows, micros, live, s == 0, versions, into[s], out[s], back[s], shared=decision.zero > 0
            )
        )
    return found
