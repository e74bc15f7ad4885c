"""Estimates of a whole decision: time, memory and messages of each stage, and the simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.ir.graph import Size
from autopart.ir.plan import Decision, Estimate, Outlook
from autopart.ir.program import Edge, Program
from autopart.ir.timeline import Timeline
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import Tied
from autopart.passes.program.schedules import find, pattern, streams
from autopart.passes.program.stream import streaming_of
from autopart.passes.simulation.charges import StageContext, summing_ns
from autopart.passes.simulation.simulate import SliceWork, Work, ordered_ns, played, simulate, step_ns
from autopart.passes.simulation.slices import contexts_of, share_of
from autopart.passes.simulation.stage_costs import (
    Estimator,
    alike,
    counts_for,
    message_bytes,
    most_bytes,
    own_bytes,
    stage_contexts,
)

Estimates = tuple[Estimate, ...]
"""The estimate of each stage, in order."""


def estimate(decision: Decision, program: Program, estimator: Estimator) -> Outlook:
    """Return `estimates` (bytes and nanoseconds), `step_ns` and `bubble` (a fraction) of a decision.

    Before: the program is the decision's, verified.  step_ns of an asynchronous schedule is micro-batches times the
    slowest stage, its steady state (PipeDream, section 3.1).  bubble: idle share of the ranks that run a stage; the
    sums of gradients and the optimizer count as idle.  O(uses + actions).
    """
    estimates = stage_estimates(decision, program.edges, estimator)
    if not find(decision.schedule).synchronous:
        return Outlook(steady_ns(decision, estimates), 0.0, estimates)
    work = work_of(decision, estimates, program.edges, program.tied, estimator)
    step = step_ns(program, work)
    shape = Shape.of(decision)
    busy = program.micros * sum(map(work.computing_ns, range(shape.stages)))
    whole = step * (len(shape.workers) if shape.homes else sum(shape.replicas))
    return Outlook(step, max(0.0, 1 - busy / whole) if whole else 0.0, estimates)


def stage_estimates(decision: Decision, links: tuple[Edge, ...], estimator: Estimator) -> Estimates:
    """Return the estimate of each stage (bytes and nanoseconds).  links: its edges (`routing.edges`).  O(uses)."""
    return tuple([estimator.stage(context) for context in stage_contexts(decision, links, estimator)])


def simulated_ns(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], tied: Tied, estimator: Estimator, *, whole: bool
) -> int:
    """Return the nanoseconds of the step.  estimates: of its stages.  links, tied: as `routing` derives them.

    whole: whether all micro-batches are played.  Else of a long program two short ones are (`played`), and the others
    follow at the same pace, but no faster than the busiest rank works: behind a slow first stage the others live for
    long on what its first forwards left them (`1f1b-deep`, with recomputation there).  O(actions).
    """
    schedule, shape = find(decision.schedule), Shape.of(decision)
    if not schedule.synchronous:
        return steady_ns(decision, estimates)
    micros, ranks = shape.micros, [stage.ranks for stage in decision.stages]
    work = work_of(decision, estimates, links, tied, estimator)
    counts = (micros,) if whole or shape.alternates else played(shape.stages, micros, decision.schedule)
    orders = [pattern(schedule, replace(shape, micros=count)) for count in counts]
    times = [ordered_ns(order, links, tied, ranks, work) for order in orders]
    if len(counts) == 1:
        return times[0]
    left = micros - counts[1]
    busiest_ns = max([sum(map(work.computing_ns, own)) for own in shape.workers])
    return times[1] + max((times[1] - times[0]) * left // (counts[1] - counts[0]), busiest_ns * left)


def steady_ns(decision: Decision, estimates: Estimates) -> int:
    """Return the nanoseconds of all micro-batches without a flush: the slowest stage sets the pace."""
    if streams(find(decision.schedule)):
        rhythm = streaming_of(decision)
        rates = zip(estimates, rhythm.periods, rhythm.updates, strict=True)
        return max(
            -(-rhythm.micros * (e.fwd_ns + e.bwd_ns) // own)
            + -(-rhythm.micros * (e.reduce_ns + e.optimizer_ns) // every)
            for e, own, every in rates
        )
    pairs = zip(estimates, Shape.of(decision).replicas, strict=True)
    return max(
        -(-len(decision.micro_rows) // replicas) * (e.fwd_ns + e.bwd_ns + e.reduce_ns + e.optimizer_ns)
        for e, replicas in pairs
    )


def timeline_of(decision: Decision, program: Program, estimator: Estimator) -> Timeline:
    """Return the simulated step of a decision, in nanoseconds and bytes."""
    estimates = stage_estimates(decision, program.edges, estimator)
    return simulate(program, work_of(decision, estimates, program.edges, program.tied, estimator))


def excess_of(
    decision: Decision, contexts: Sequence[StageContext], estimator: Estimator, spare_bytes: Sequence[int] = ()
) -> list[int]:
    """Return the bytes that each stage needs beyond the memory of its devices; negative where it fits.  contexts: of
    the decision (`stage_contexts`).

    With several stages a rank it is the need of all stages of its rank: the weights, gradients, optimizer state,
    messages and inputs of each, the most that they hold together for their backwards, at any time of the order, and the
    largest workspace of one of them.  Assumed, and wrong where: a parameter that two stages of a rank share counts for
    both; the room that activations leave for half-precision gradients at the end of a step is found for each stage
    alone, so that less of it is used.  spare_bytes: of each stage, memory to leave free on its devices.  O(uses).
    """
    shape = Shape.of(decision)
    spare = spare_bytes or (0,) * len(contexts)
    found = []
    for context, free in zip(contexts, spare, strict=True):
        excess = []
        for ranks in (groups := alike(context.stage)):
            need = estimator.stage_on(context, ranks) if len(groups) > 1 else estimator.stage(context)
            excess.append(need.peak_bytes - estimator.cluster.least_memory_bytes(ranks))
        found.append(max(excess) + free)
    counts = counts_for(decision) if shape.homes else None
    if counts is None:
        return found
    for own in [stages for stages in shape.workers if len(stages) > 1]:
        estimates = [estimator.stage(contexts[s]) for s in own]
        sizes = [e.activation_bytes for e in estimates], [e.weight_bytes for e in estimates]
        held = most_bytes(counts[own], *sizes, sum(decision.token_slices) or 1)
        static = sum([own_bytes(contexts[s], e) for s, e in zip(own, estimates, strict=True)])
        peak_bytes = static + held + max(e.workspace_bytes for e in estimates)
        limit = estimator.cluster.least_memory_bytes(decision.stages[own[0]].ranks)
        for s in own:
            found[s] = peak_bytes + sum([spare[other] for other in own]) - limit
    return found


def work_of(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], tied: Tied, estimator: Estimator
) -> Work:
    """Return what the simulator needs, in nanoseconds and bytes.  estimates: of the stages."""
    stages, loads = decision.stages, estimator.loads
    index = estimator.graph(Size(max(decision.micro_rows)))
    params = [index.params_of(stage) for stage in stages]
    sums = []  # of each stage; a tied gradient is summed once, over all its stages
    for s, stage in enumerate(stages):
        apart = sum([index.summed[name] for name, users in tied if s in users])
        sums.append((params[s].summed_bytes - apart, stage.ranks))
    ties = []  # stages, bytes and ranks of each
    for name, users in tied:
        ties.append((users, index.summed[name], tuple(sorted({rank for s in users for rank in stages[s].ranks}))))
    return Work(
        fwd_ns=tuple(e.fwd_ns for e in estimates),
        bwd_ns=tuple(e.bwd_ns for e in estimates),
        held_bytes=tuple(0 if s.forward_only else e.activation_bytes for s, e in zip(stages, estimates, strict=True)),
        messages={
            (src, dst, way): (size, loads.between(stages[src], stages[dst]))
            for (src, dst, way), size in message_bytes(links, index.values).items()
        },
        tied=tuple((users, size, loads.ring(ranks, 2)) for users, size, ranks in ties),
        tying_ns=tuple(summing_ns(size, ranks, estimator.cluster) for _, size, ranks in ties),
        reduce=tuple((size, loads.to_owners(ranks) if decision.zero else loads.ring(ranks, 2)) for size, ranks in sums),
        summing_ns=tuple(summing_ns(size, ranks, estimator.cluster) for size, ranks in sums),
        gather=tuple(
            (used.trained_bytes, loads.ring(stage.ranks, 1))
            for used, stage in zip(params, stages if decision.zero else (), strict=False)
        ),
        optimizer_ns=tuple(e.optimizer_ns for e in estimates),
        overlap=estimator.overlap,
        host=estimator.cluster.host,
        bucket_bytes=decision.bucket_bytes,
        slices=_slice_works(decision, estimates, links, estimator) if decision.token_slices else (),
        weight_ns=tuple(e.weight_ns for e in estimates),
        weight_bytes=tuple(e.weight_bytes for e in estimates),
        hidden_ns=tuple(e.hidden_ns for e in estimates),
    )


def _slice_works(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], estimator: Estimator
) -> tuple[SliceWork, ...]:
    """Return what each slice takes, in nanoseconds and bytes.  estimates: of the stages, for whole sequences."""
    lengths, tokens = decision.token_slices, sum(decision.token_slices)
    index, contexts = estimator.graph(Size(max(decision.micro_rows))), contexts_of(lengths)
    times: tuple[list[list[int]], list[list[int]]] = [], []
    for stage, known in zip(decision.stages, estimates, strict=True):
        ops = {part for name in stage.ops for part in index.ops[name].parts or (name,)}
        for total, backward in ((known.fwd_ns, False), (known.bwd_ns, True)):
            taken = estimator.slices.stage_ns(ops, total, lengths, contexts, backward=backward)
            times[backward].append(taken.astype(int).tolist())

    def shares(amounts: Sequence[int], length: int) -> tuple[int, ...]:
        return tuple([share_of(amount, length, tokens) for amount in amounts])

    held = [0 if s.forward_only else e.activation_bytes for s, e in zip(decision.stages, estimates, strict=True)]
    works = []
    for j, length in enumerate(lengths):
        fwd_ns, bwd_ns = (tuple([own[j] for own in each]) for each in times)
        sizes = message_bytes(links, index.values, j, length, tokens)
        weight_ns = tuple(map(min, bwd_ns, shares([e.weight_ns for e in estimates], length)))
        kept = shares([e.weight_bytes for e in estimates], length)
        works.append(SliceWork(fwd_ns, bwd_ns, shares(held, length), sizes, weight_ns, kept))
    return tuple(works)
