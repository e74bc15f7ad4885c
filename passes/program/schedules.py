"""Schedules: the order in which each worker runs its forwards and backwards.

A schedule is a function of the numbers of stages and micro-batches that returns the order of computes of each worker.
Everything else (messages, the order of all actions, micro-batches in flight, times, the proof that it ends) is derived
from that order, so that a user's schedule needs nothing else.  `named` has the built-in ones; `orders` says what an
order is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from autopart.ir.actions import ACTIONS, BACKWARD, COMPUTE, COMPUTES, FORWARD, IN_FLIGHT, Action, hands_on, parse_action
from autopart.ir.errors import ProgramError, UsageError, shortened
from autopart.passes.program.named import BUILT_IN, FAMILY, SEARCHED, ahead_of
from autopart.passes.program.orders import Order, Schedule, Shape, Turn

_COMPUTE_KINDS = tuple(name for name, kind in ACTIONS.items() if kind.role == COMPUTE)

_registered: dict[str, Schedule] = {}


def register(schedule: Schedule | Order, name: str = "") -> Schedule:
    """Register a schedule under its name, or a plain function under `name` or its own name.

    A plan names its schedule, so every rank has to register the same one.  Registering a name again replaces the
    schedule.  Raises UsageError for a function without a usable name and for a name of a built-in schedule.
    """
    made = schedule if isinstance(schedule, Schedule) else Schedule(name or getattr(schedule, "__name__", ""), schedule)
    if not made.name.isprintable() or not made.name.strip("<> ") or made.name == "<lambda>":
        raise UsageError("a schedule needs a name", fix="register(order, name=...), or define it with def")
    if made.name in ("auto", *(schedule.name for schedule in BUILT_IN)) and made not in BUILT_IN:
        raise UsageError(f"the name {made.name!r} is taken", fix="give the schedule another name")
    _registered[made.name] = made
    return made


def find(name: str) -> Schedule:
    """Return the schedule of this name.  Raises UsageError that lists the known ones."""
    if name not in _registered:
        raise UsageError(
            f"unknown schedule {shortened(name)!r}",
            why="a schedule has to be registered on every rank before a plan that uses it is made, read or run",
            fix=f"use one of {', '.join(names())}, or register it: autopart.register_schedule(my_order)",
        )
    return _registered[name]


def names() -> tuple[str, ...]:
    """Return the names of all schedules: the built-in ones, then the user's."""
    return tuple(_registered)


# ---- derived from an order -----------------------------------------------------------------------------------------


def streams(schedule: Schedule) -> bool:
    """Return whether batches follow each other without a flush between them (`pipe.train`)."""
    return not schedule.synchronous and schedule in BUILT_IN


def most_held(schedule: Schedule, stage: int, shape: Shape) -> int | None:
    """Return the most micro-batches, or slices, that a rank of the stage may have in flight; None: no limit."""
    if schedule.limit is None:
        return None
    if streams(schedule):  # the next batch follows at once
        own = shape.replicas[stage]
        return -(-sum(shape.replicas[stage:]) // own)
    if shape.alternates and schedule.turns is not None:
        return None if schedule.splits else ahead_of(schedule.limit, stage, shape)  # what W frees depends on the order
    units = shape.micros * shape.slices
    return min(units, schedule.limit(stage, shape.stages, units) + shape.slices - 1)


def worker_orders(schedule: Schedule, shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield the computes of each worker: a stage, or one of its replicas that take micro-batches in turn.

    A schedule need not know which stages have no backward: what it has there is left out; nor which have whole ones: B
    then runs where I would.  A user's need not know replicas in turn either: each runs its part of the stage's order.
    Raises ProgramError for anything that is not a compute of this pipeline, and for slices if the schedule has no order
    over them.
    O(stages * micros * slices) for all workers.
    """
    if shape.slices > 1 and not schedule.sliced:
        raise ProgramError(
            f"schedule {schedule.name} has no order over slices of sequences",
            fix=f"use one of {', '.join(FAMILY)}, or token_slices=None",
        )
    if shape.order and schedule.name != SEARCHED:
        raise ProgramError(
            f"schedule {schedule.name} has an order of its own, and the plan fixes another",
            fix=f"leave the order of the plan empty, or name its schedule {SEARCHED!r}",
        )
    for turns in _whole_orders(schedule, shape):
        yield unsplit(without_backward(turns, shape.forward_only), shape.whole)


def without_backward(turns: tuple[Turn, ...], stages: Collection[int]) -> tuple[Turn, ...]:
    """Return the computes without backwards of these stages."""
    if not stages:
        return turns
    return tuple([turn for turn in turns if turn[0] == COMPUTES[FORWARD] or turn[1] not in stages])


def unsplit(turns: tuple[Turn, ...], stages: Collection[int]) -> tuple[Turn, ...]:
    """Return the computes with whole backwards on these stages: B in the place of I, and no W.

    Others wait for I alone, so an order that ends still ends; and a slot holds nothing behind B, so no worker ever
    holds more.
    """
    if not stages:
        return turns
    parts = {name: COMPUTES[BACKWARD] if hands_on(name) else "" for name, kind in ACTIONS.items() if kind.part_of}
    found = [(parts.get(kind, kind) if stage in stages else kind, stage, unit) for kind, stage, unit in turns]
    return tuple([turn for turn in found if turn[0]])


def _whole_orders(schedule: Schedule, shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield the computes of each worker as if every stage had a backward."""
    of = shape.replicas
    if schedule.turns is not None:
        yield from schedule.turns(shape)
        return
    try:
        for worker, order in enumerate(schedule.order(shape.stages, shape.micros)):
            found = tuple(_turn(item, worker, schedule, shape) for item in order)
            parts = lcm(*(of[stage] for _, stage, _ in found))
            for part in range(parts):
                yield tuple(turn for turn in found if parts == 1 or turn[2] % of[turn[1]] == part % of[turn[1]])
    except (TypeError, ValueError) as error:
        raise ProgramError(
            f"schedule {schedule.name} did not return an order of computes for each worker",
            why=str(error),
            fix='return a list for each worker, as [["0F0", "0B0"], ["1F0", "1B0"]] for 2 stages and 1 micro-batch',
        ) from error


def _turn(item: Action | str | Turn, worker: int, schedule: Schedule, shape: Shape) -> Turn:
    stages, micros = shape.stages, shape.micros
    if not isinstance(item, Action | str):
        kind, stage, micro = item
    else:
        action = parse_action(item) if isinstance(item, str) else item
        kind, stage, micro = action.kind, action.stage, action.micro
        if action.slot.slice:
            raise ProgramError(f"schedule {schedule.name}: {action} is a slice; return whole micro-batches")
    if kind in _COMPUTE_KINDS and 0 <= stage < stages and 0 <= micro < micros:
        return kind, stage, micro
    raise ProgramError(
        f"schedule {schedule.name}: {stage}{kind}{micro} is not a compute",
        where=f"worker {worker}",
        why=f"there are {stages} stages and {micros} micro-batches",
        fix=f"return computes alone ({' and '.join(_COMPUTE_KINDS)}); messages and sums follow from them",
    )


@lru_cache(maxsize=4096)
def in_flight(schedule: Schedule, stage: int, shape: Shape) -> int:
    """Return the most micro-batches (or slices) whose activations a rank of a stage holds.

    Built-in schedules hold as many as they may; of others it is counted; a stage without a backward holds the one that
    it runs.  O(stages * micros).
    """
    if stage in shape.forward_only:
        return 1
    held = most_held(schedule, stage, shape) if schedule.turns is not None else None
    return held if held is not None else most_tokens(schedule, shape, (1,) * shape.slices)[stage]


@lru_cache(maxsize=64)
def most_tokens(schedule: Schedule, shape: Shape, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the most tokens whose activations a rank of each stage holds.  lengths: of the slices.

    O(stages * micros * slices).
    """
    most = [0] * shape.stages
    for order in pattern(schedule, shape).workers:
        held = dict.fromkeys({stage for _, stage, _ in order}, 0)
        for kind, stage, unit in order:
            held[stage] += IN_FLIGHT[kind] * lengths[unit % len(lengths)]
            most[stage] = max(most[stage], held[stage])
            if stage in shape.forward_only and unit % len(lengths) == len(lengths) - 1:
                held[stage] = 0
    return tuple(most)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The order of computes of a schedule, as the simulator plays it.

    workers: the computes of each worker.  in_order: whether all stages take whole micro-batches in one order, so that
    messages are received in the order in which they are sent.
    """

    shape: Shape
    workers: tuple[tuple[Turn, ...], ...]
    in_order: bool


@lru_cache(maxsize=32)
def pattern(schedule: Schedule, shape: Shape) -> Pattern:
    """Return the pattern of a schedule, cached: candidates of a search share few.  O(stages * micros * slices)."""
    return pattern_of(shape, worker_orders(schedule, shape))


def pattern_of(shape: Shape, orders: Iterable[Iterable[Turn]]) -> Pattern:
    """Return the pattern of these orders of the workers.  O(stages * micros * slices)."""
    found = tuple([without_backward(tuple(turns), shape.forward_only) for turns in orders if turns])
    whole = shape.slices == 1 and not shape.alternates
    return Pattern(shape, found, whole and _in_one_order(found, shape.stages))


def _in_one_order(orders: Iterable[Iterable[Turn]], stages: int) -> bool:
    """Return whether all stages take the micro-batches in one order forward, and in one order backward."""
    micros: dict[tuple[str, int], list[int]] = {}
    for turns in orders:
        for kind, stage, micro in turns:
            micros.setdefault((hands_on(kind), stage), []).append(micro)
    for kind in COMPUTES.values():
        of_stages = [micros[kind, stage] for stage in range(stages) if (kind, stage) in micros]
        if any(own != of_stages[0] for own in of_stages):
            return False
    return True


for _schedule in BUILT_IN:
    register(_schedule)
