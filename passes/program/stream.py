"""Lowering of asynchronous training: one program for any number of batches between two flushes.

Micro-batches are counted over all batches.  In tick i a stage runs the forward of micro-batch i and the backward of
micro-batch i - lag, and updates its weights behind the last backward of a batch.  Warm-up and drain are the same ticks
without what has not begun or has ended, so a few turns of the ring prove any number of batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import lcm

from autopart.ir.actions import BACKWARD, COMPUTES, FORWARD, SENDS, Action, Slot
from autopart.ir.decision import Decision
from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.program import Program, Streaming
from autopart.passes.program.linearize import receivers
from autopart.passes.program.named import DELAYED
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import find, most_held
from autopart.passes.program.verify import check_program


def streaming_of(decision: Decision) -> Streaming:
    """Return the rhythm of a plan's asynchronous training.  Before: its schedule streams.

    A batch is cut into the plan's micro-batches.  A stage updates its weights with the gradient of every batch, once
    all its micro-batches have come back.  With r replicas that take m micro-batches of a batch in turn, it does so with
    the mean over r / gcd(r, m) batches, so that each replica has as many of their micro-batches.
    """
    schedule, shape = find(decision.schedule), Shape.of(decision)
    held = [most_held(schedule, stage, shape) or 1 for stage in range(shape.stages)]
    lags = tuple(own * (count - 1) for own, count in zip(shape.replicas, held, strict=True))
    updates = tuple(lcm(own, shape.micros) for own in shape.replicas)
    return Streaming(shape.micros, lags, updates, shape.replicas, schedule.name == DELAYED)


def require_two_versions(decision: Decision) -> None:
    """Raise PlanError for pipedream-2bw with fewer micro-batches than are in flight, or with replicas in turn whose
    number does not divide them: two versions of the weights would not be enough."""
    rhythm = streaming_of(decision)
    most, unit = max(rhythm.lags), lcm(*rhythm.periods)
    if rhythm.delayed and (most > rhythm.micros or rhythm.micros % unit):
        raise PlanError(
            f"{decision.schedule} cannot train with batches of {rhythm.micros} micro-batches on these stages",
            why=f"with two versions of the weights, a batch has at least {max(1, most)} micro-batches, as many for "
            "each of the replicas that take them in turn",
            fix=f'use micro_batches={-(-max(1, most) // unit) * unit}, or schedule="pipedream"',
        )


def stream_program(decision: Decision, graph: Graph, batches: int, prologue: Collection[str] = ()) -> Program:
    """Return everything that all ranks do with some batches, from an empty pipeline to an empty one.

    Before: `plan.check_decision` holds and the schedule streams.  After: the computes of each rank stand in the order
    of 1F1B (PipeDream, SOSP 2019, section 3.2), over all batches without a gap; an update stands behind the last
    backward that it needs.  prologue: as for `routing.edges`.  O(stages * micro-batches of all batches).
    """
    rhythm = streaming_of(decision)
    rows = decision.micro_rows * batches
    bare = route(replace(decision, micro_rows=rows), graph, prologue)
    program = replace(bare, order=(), rhythm=rhythm)
    return replace(program, order=tuple(_ticks(rhythm, program)))


def ring_programs(
    decision: Decision, graph: Graph, prologue: Collection[str] = ()
) -> tuple[Streaming, Program, Program]:
    """Return the rhythm of a plan, its program for the batches of one turn of the ring, and for those of three turns.

    Both are proven.  What follows is proven with them: behind the warm-up, and before the drain, every tick does the
    same as the one before, and leaving out micro-batches leaves an order in which everything stands behind its needs.
    """
    rhythm = streaming_of(decision)
    batches = rhythm.ring // rhythm.micros
    once, thrice = (
        check_program(stream_program(decision, graph, turns * batches, prologue), decision.schedule) for turns in (1, 3)
    )
    return rhythm, once, thrice


def tick_of(rhythm: Streaming, action: Action) -> int:
    """Return the tick in which an action of a stage is played: that of the compute that it belongs to."""
    forward = action.is_a.way == FORWARD
    return action.micro if forward else action.micro + rhythm.lags[action.stage]


def ring_ticks(rhythm: Streaming, program: Program, rank: int) -> tuple[tuple[Action, ...], ...]:
    """Return what a rank does in each tick of the steady state, for one turn of the ring (`Streaming.ring`), with the
    micro-batches numbered in the ring.  program: of three turns at least, whose second one is read."""
    ring = rhythm.ring
    found: list[list[Action]] = [[] for _ in range(ring)]
    for action in program.part(rank):
        tick = tick_of(rhythm, action)
        if ring <= tick < 2 * ring:
            found[tick - ring].append(in_ring(action, ring))
    return tuple(map(tuple, found))


def in_ring(action: Action, ring: int) -> Action:
    """Return an action with its micro-batch numbered in the ring."""
    slot = action.slot
    return Action(action.kind, Slot(slot.stage, slot.micro % ring, slot.slice), action.peer)


def _ticks(rhythm: Streaming, program: Program) -> Iterator[Action]:
    """Yield the actions of all ticks, each message behind the compute that makes it.

    Stages go forward in ascending order and back in descending order, so that a micro-batch passes all stages in one
    tick forward.  Its backward comes no later on a later stage, since lags only shrink (`streaming_of`).
    """
    stages, to = range(len(rhythm.lags)), receivers(program.edges)

    def behind(way: str, slot: Slot) -> Iterator[Action]:
        yield Action(COMPUTES[way], slot)
        for peer in to.get((way, slot.stage), ()):
            yield Action(SENDS[way], slot, peer)

    for tick in range(rhythm.last_tick(program.micros) + 1):
        for stage in stages if tick < program.micros else ():
            yield from behind(FORWARD, Slot(stage, tick))
        for stage in reversed(stages):
            micro, every = tick - rhythm.lags[stage], rhythm.updates[stage]
            if 0 <= micro < program.micros:
                yield from behind(BACKWARD, Slot(stage, micro))
            if micro >= 0 and micro % every == every - 1 and micro - every + 1 < program.micros:
                yield program.updating(stage, min(micro, program.micros - 1))
