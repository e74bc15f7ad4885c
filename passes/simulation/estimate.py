"""Estimates of a whole decision: time, memory and messages of each stage, and the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.ir.plan import Decision, Estimate, Report
from autopart.ir.program import BACKWARD, FORWARD, Edge, Program
from autopart.ir.size import Size
from autopart.ir.timeline import Timeline
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import Shape, find, in_flight, most_tokens, pattern
from autopart.passes.simulation.play import Message, SliceWork, Work
from autopart.passes.simulation.simulate import ordered_ns, simulate, step_ns
from autopart.passes.simulation.slices import SliceShares, contexts_of, share_of
from autopart.passes.simulation.stage_costs import (
    Estimator,
    GraphIndex,
    StageContext,
    excess_bytes,
    summing_ns,
)

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
    work = work_of(decision, estimates, program, estimator)
    step = step_ns(program, work)
    busy = program.micros * sum(sum(part.fwd_ns) + sum(part.bwd_ns) for part in work.slices or (work,))
    whole = step * sum(Shape.of(decision).replicas)
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
    schedule, shape = find(decision.schedule), Shape.of(decision)
    if not schedule.synchronous:
        return steady_ns(decision, estimates)
    ranks, micros = [stage.ranks for stage in decision.stages], shape.micros
    work = _work(decision, estimates, links, shared, estimator)
    counts = (micros,) if shape.alternates else played(shape.stages, micros, decision.schedule)
    orders = [pattern(schedule, replace(shape, micros=count)) for count in counts]
    times = [ordered_ns(order, links, shared, ranks, work) for order in orders]
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
    pairs = zip(estimates, Shape.of(decision).replicas, strict=True)
    return max(
        -(-len(decision.micro_rows) // turns) * (e.fwd_ns + e.bwd_ns + e.reduce_ns + e.optimizer_ns)
        for e, turns in pairs
    )


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


def excess_of(
    decision: Decision, links: tuple[Edge, ...], estimator: Estimator, spare_bytes: Sequence[int] = ()
) -> list[int]:
    """What each stage needs beyond what its devices have, in bytes; negative where it fits.  spare_bytes: of each stage
    what is left free on its devices, where not nothing.  O(uses)."""
    sizes = message_bytes(links, estimator.graph(Size(max(decision.micro_rows)), 0))
    contexts = stage_contexts(decision, sizes)
    spare = spare_bytes or (0,) * len(contexts)
    return [excess_bytes(context, estimator, free) for context, free in zip(contexts, spare, strict=True)]


def _work(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], shared: Tied, estimator: Estimator
) -> Work:
    ranks, loads = [stage.ranks for stage in decision.stages], estimator.loads
    index = estimator.graph(Size(max(decision.micro_rows)), 0)
    params = [index.params_of(stage) for stage in decision.stages]
    apart = [sum([index.summed[name] for name, users in shared if stage in users]) for stage in range(len(ranks))]
    summed = [  # what is tied is summed once, over all its stages
        (index.summed_bytes(used) - tied_bytes, own) for used, own, tied_bytes in zip(params, ranks, apart, strict=True)
    ]
    return Work(
        fwd_ns=tuple(e.fwd_ns for e in estimates),
        bwd_ns=tuple(e.bwd_ns for e in estimates),
        held_bytes=tuple(e.activation_bytes for e in estimates),
        messages={
            (src, dst, way): (size, loads.passing(decision.stages[src], decision.stages[dst]))
            for (src, dst, way), size in message_bytes(links, index).items()
        },
        tied=tuple(
            (
                users,
                index.summed[name],
                loads.ring_allreduce(tuple(sorted({r for stage in users for r in ranks[stage]}))),
            )
            for name, users in shared
        ),
        reduce=tuple((size, loads.ring(ranks, 1 if decision.zero else 2)) for size, ranks in summed),
        summing_ns=tuple(summing_ns(size, ranks, estimator.context.cluster) for size, ranks in summed),
        gather=tuple((index.trained_bytes(used), loads.ring(own, 1)) for used, own in zip(params, ranks, strict=True))
        if decision.zero
        else (),
        optimizer_ns=tuple(e.optimizer_ns for e in estimates),
        overlap=estimator.context.overlap,
        turns=Shape.of(decision).replicas,
        bucket_bytes=decision.bucket_bytes,
        slices=slice_works(decision, estimates, links, estimator) if decision.token_slices else (),
    )


def slice_works(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], estimator: Estimator
) -> tuple[SliceWork, ...]:
    """What each slice takes, in nanoseconds and bytes; estimates: of the stages, for whole sequences.  O(uses)."""
    lengths, tokens = decision.token_slices, sum(decision.token_slices)
    shares = estimator.context.slices or SliceShares(tokens, {}, (), (), 0)
    index, contexts = estimator.graph(Size(max(decision.micro_rows)), 0), contexts_of(lengths)
    times = []
    for stage, known in zip(decision.stages, estimates, strict=True):
        ops = {part for name in stage.ops for part in index.ops[name].parts or (name,)}
        for total, back in ((known.fwd_ns, False), (known.bwd_ns, True)):
            times.append(shares.stage_ns(ops, total, lengths, contexts, backward=back).astype(int).tolist())
    forward, backward = times[::2], times[1::2]
    return tuple(
        SliceWork(
            tuple(own[j] for own in forward),
            tuple(own[j] for own in backward),
            tuple(share_of(known.activation_bytes, length, tokens) for known in estimates),
            _slice_sizes(links, index, j, length, tokens),
        )
        for j, length in enumerate(lengths)
    )


def _slice_sizes(links: tuple[Edge, ...], index: GraphIndex, j: int, length: int, tokens: int) -> dict[Message, int]:
    """Bytes of the messages of a slice."""
    size = index.values

    def of(edge: Edge, way: str) -> int:
        whole = set(edge.whole)
        return sum([size[v] if v in whole else share_of(size[v], length, tokens) for v in edge.names(way, j)])

    sizes = {(e.src, e.dst, FORWARD): of(e, FORWARD) for e in links}
    return sizes | {(e.dst, e.src, BACKWARD): of(e, BACKWARD) for e in links if e.grads}


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
    schedule, found, shape = find(decision.schedule), [], Shape.of(decision)
    whole = replace(shape, slices=1)
    for s, stage in enumerate(decision.stages):
        live = in_flight(schedule, s, whole)
        held = None
        if lengths := decision.token_slices:
            held = most_tokens(schedule, s, shape, lengths), sum(lengths)
            live = -(-held[0] // held[1])
        versions = 1 if schedule.synchronous else live
        found.append(
            StageContext(
                stage,
                rows,
                micros,
                live,
                s == 0,
                versions,
                into[s],
                out[s],
                back[s],
                shared=decision.zero > 0,
                held=held,
            )
        )
    return found
