"""Schedules: in which order each worker runs its forwards and backwards.

A schedule is a function of the numbers of stages and of micro-batches that returns, for each worker, the order of its
computes.  What follows from that (messages, one order of everything, what is in flight, how long it takes, whether it
can ever end) is found from the order itself, so that a schedule of a user needs nothing else.

gpipe, 2 stages, 3 micro-batches        1f1b
0F0 0F1 0F2 0B0 0B1 0B2                 0F0 0F1 0B0 0F2 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2

Sequences may be cut into slices (TeraPipe, ICML 2021, for fill-drain; Seq1F1B, NAACL 2025, for 1F1B).  A slice needs
what the slices before it left behind, and gets gradients from those after it, so the slices of a micro-batch go back
last in, first out; micro-batches go back first in, first out, as ever.  A stage holds s - 1 slices more than it would
hold micro-batches, each an s-th as large: (s + p - 1) / s sequences under 1F1B instead of p.

1f1b, 2 stages, 2 micro-batches of 2 slices
0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1

Where the replicas of a stage take micro-batches in turn, each of them is a worker of its own.  A pipeline then holds as
many micro-batches as one that has a stage for each of these replicas, and a replica its part of what its stage holds:
of r replicas, with R of them from this stage to the end, ceil(R / r) under 1F1B (PipeDream, SOSP 2019, section 3.2).
A replica that takes micro-batches in slices holds as many micro-batches, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from math import lcm

from autopart.ir.errors import ProgramError, UsageError
from autopart.ir.plan import Decision
from autopart.ir.printable import shortened
from autopart.ir.program import ACTIONS, BACKWARD, COMPUTE, COMPUTES, FORWARD, Action, parse_action

Turn = tuple[str, int, int]
"""One compute: its kind, its stage and its unit, which is its micro-batch.  Where each is cut into s slices, slice j of
micro-batch m is unit s * m + j."""

_F, _B = COMPUTES[FORWARD], COMPUTES[BACKWARD]
_COMPUTE_KINDS = tuple(name for name, kind in ACTIONS.items() if kind.role == COMPUTE)


@dataclass(frozen=True, slots=True)
class Shape:
    """What an order of computes is made for.

    slices: of each micro-batch's sequences.  in_turn: of each stage, the number of replicas that take micro-batches in
    turn, 1 where none do; empty where no stage has any.
    """

    stages: int
    micros: int
    slices: int = 1
    in_turn: tuple[int, ...] = ()

    @staticmethod
    def of(decision: Decision) -> Shape:
        """The shape of a decision's order."""
        periods = tuple(stage.division.period for stage in decision.stages)
        return Shape(len(periods), len(decision.micro_rows), decision.slices, periods)

    @property
    def alternates(self) -> bool:
        """Whether the replicas of any stage take micro-batches in turn."""
        return max(self.in_turn, default=1) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage, the replicas that take micro-batches in turn, 1 where none do."""
        return self.in_turn or (1,) * self.stages


@dataclass(frozen=True, slots=True)
class Ascending:
    """The order of a worker with one stage that takes the micro-batches in ascending order, forward and backward.

    kinds: of its computes, as "FFBFBB"; the k-th of a kind is that of micro-batch first + k * step.  Short to write,
    fast to count.  slices: of each micro-batch, which go back in descending order.
    """

    stage: int
    kinds: str
    slices: int = 1
    first: int = 0
    step: int = 1

    def __iter__(self) -> Iterator[Turn]:
        units = {kind: self._units(back=kind == _B) for kind in _COMPUTE_KINDS}
        return ((kind, self.stage, next(units[kind])) for kind in self.kinds)

    def _units(self, *, back: bool) -> Iterator[int]:
        micros = count(self.first, self.step)
        if self.slices == 1:
            return micros
        pieces = range(self.slices)[::-1] if back else range(self.slices)
        return (micro * self.slices + piece for micro in micros for piece in pieces)


Order = Callable[[int, int], Iterable[Iterable[Action | str | Turn]]]
"""(stages, micro-batches) to the computes of each worker in order: texts like "2F0", actions or turns."""
Limit = Callable[[int, int, int], int]
"""(stage, stages, micro-batches) to the micro-batches that the stage may have in flight at most."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named order of computes.

    synchronous: every step ends with the optimizer; else weights are updated while micro-batches are in flight, each
    with a copy of the weights that it began with.  limit: what the order promises about micro-batches in flight, which
    the verifier holds it to; None promises nothing.  warm_up: micro-batches per stage after which the order repeats
    itself at an even pace; 0 where that is not known.
    """

    name: str
    order: Order
    synchronous: bool = True
    limit: Limit | None = None
    warm_up: int = 0


_registered: dict[str, Schedule] = {}


def register(schedule: Schedule | Order, name: str = "") -> Schedule:
    """Make a schedule known under its name, or under `name`; a plain function is known under its own.

    A program is planned and run with what is registered under the name in its plan, so every rank registers the same.
    Registering a name again replaces what was there.  Raises UsageError for a function without a usable name and for a
    name of a built-in schedule.
    """
    made = schedule if isinstance(schedule, Schedule) else Schedule(name or getattr(schedule, "__name__", ""), schedule)
    if not made.name.isprintable() or not made.name.strip("<> ") or made.name == "<lambda>":
        raise UsageError("a schedule needs a name", fix="register(order, name=...), or define it with def")
    if made.name in ("auto", *(schedule.name for schedule in BUILT_IN)) and made not in BUILT_IN:
        raise UsageError(f"the name {made.name!r} is taken", fix="give the schedule another name")
    if not made.synchronous and made not in BUILT_IN:
        raise UsageError(
            f"schedule {made.name} cannot be registered as asynchronous", fix="end each step with the optimizer"
        )
    _registered[made.name] = made
    return made


def find(name: str) -> Schedule:
    """The schedule of this name.  Raises UsageError that names the known ones."""
    if name not in _registered:
        raise UsageError(
            f"unknown schedule {shortened(name)!r}",
            why="a schedule has to be registered on every rank before a plan that uses it is made, read or run",
            fix=f"use one of {', '.join(names())}, or register it: autopart.register_schedule(my_order)",
        )
    return _registered[name]


def names() -> tuple[str, ...]:
    """All known schedules: the built-in ones, of the one that holds least to the one that holds most, then others."""
    return tuple(_registered)


# ---- what follows from an order ------------------------------------------------------------------------------------


def takes_slices(schedule: Schedule) -> bool:
    """Whether there is an order of it over slices."""
    return schedule in BUILT_IN and schedule.synchronous


def most_held(schedule: Schedule, stage: int, shape: Shape) -> int | None:
    """Micro-batches, or slices, that a rank of the stage may have in flight at most; None: the schedule promises
    nothing."""
    if schedule.limit is None:
        return None
    stages, micros, slices = shape.stages, shape.micros, shape.slices
    if shape.alternates and schedule in BUILT_IN:
        held, own = schedule.limit(0, sum(shape.in_turn[stage:]), micros), shape.in_turn[stage]
        return slices * min(-(-micros // own), -(-held // own))
    units = micros * slices
    return min(units, schedule.limit(stage, stages, units) + slices - 1)


def _built_in_orders(schedule: Schedule, shape: Shape) -> Iterator[Ascending]:
    """The order of each worker, which is a stage, or one of its replicas where these take micro-batches in turn; see
    the head of this module.  Raises ProgramError where the schedule has no order over slices."""
    if shape.slices > 1 and not takes_slices(schedule):
        raise ProgramError(
            f"schedule {schedule.name} has no order over slices of sequences",
            fix=f"use one of {', '.join(AUTOMATIC)}, or token_slices=None",
        )
    for stage, replicas in enumerate(shape.replicas):
        most = most_held(schedule, stage, shape) or 0
        for replica in range(replicas):
            own = len(range(replica, shape.micros, replicas)) * shape.slices
            yield Ascending(stage, _kinds(min(most, own), own), shape.slices, replica, replicas)


def worker_orders(schedule: Schedule, shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """The turns of each worker, one after the other; raises ProgramError for what is not a compute of this pipeline.

    A schedule of a user is not asked about replicas that take micro-batches in turn: each does its part of what the
    stage would do, in that order.  O(stages * micros * slices) for all of them.
    """
    if shape.slices > 1 or schedule in BUILT_IN:
        yield from map(tuple, _built_in_orders(schedule, shape))
        return
    of = shape.replicas
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
    if isinstance(item, tuple):
        kind, stage, micro = item
    else:
        action = parse_action(item) if isinstance(item, str) else item
        kind, stage, micro = action.kind, action.stage, action.micro
        if action.slot.slice:
            raise ProgramError(f"schedule {schedule.name}: {action} is a slice, which no plan has")
    if kind in _COMPUTE_KINDS and 0 <= stage < stages and 0 <= micro < micros:
        return kind, stage, micro
    raise ProgramError(
        f"schedule {schedule.name}: {stage}{kind}{micro} is no compute of {stages} stages and {micros} micro-batches",
        where=f"worker {worker}",
        fix=f"return computes alone ({' and '.join(_COMPUTE_KINDS)}); messages and sums follow from them",
    )


def in_flight(schedule: Schedule, stage: int, shape: Shape) -> int:
    """Micro-batches (or slices) whose activations a rank of a stage holds at most, counted from the order."""
    return _all_in_flight(schedule, shape)[stage]


@lru_cache(maxsize=4096)
def most_tokens(schedule: Schedule, stage: int, shape: Shape, lengths: tuple[int, ...]) -> int:
    """Tokens whose activations a rank of a stage holds at most.  lengths: of the slices.
    O(stages * micros * slices)."""
    most = 0
    for order in _built_in_orders(schedule, shape):
        if order.stage == stage:
            held = ((1 if kind == _F else -1) * lengths[unit % len(lengths)] for kind, _, unit in order)
            most = max(most, *accumulate(held, initial=0), 0)
    return most


@lru_cache(maxsize=4096)
def _all_in_flight(schedule: Schedule, shape: Shape) -> tuple[int, ...]:
    """`in_flight` of every stage.  O(stages * micros * slices)."""
    most = [0] * shape.stages
    if shape.slices > 1 or schedule in BUILT_IN:
        for order in _built_in_orders(schedule, shape):
            most[order.stage] = max(most[order.stage], _most_in_flight(order.kinds))
        return tuple(most)
    for own in worker_orders(schedule, shape):
        for stage in {stage for _, stage, _ in own}:
            kinds = "".join([kind for kind, at, _ in own if at == stage])
            most[stage] = max(most[stage], _most_in_flight(kinds))
    return tuple(most)


@lru_cache(maxsize=4096)
def _most_in_flight(kinds: str) -> int:
    """Of forwards and backwards in this order.  Many stages and schedules have the same."""
    return max(accumulate(1 if kind == _F else -1 for kind in kinds), default=0)


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
    orders = tuple(turns for turns in worker_orders(schedule, shape) if turns)
    whole = shape.slices == 1 and not shape.alternates
    return Pattern(shape, orders, whole and in_one_order(orders, shape.stages))


def in_one_order(orders: Iterable[Iterable[Turn]], stages: int) -> bool:
    """Whether all stages take the micro-batches in one order forward, and in one order backward."""
    micros: dict[tuple[str, int], list[int]] = {}
    for turns in orders:
        for kind, stage, micro in turns:
            micros.setdefault((kind, stage), []).append(micro)
    return all(
        micros.get((kind, stage), []) == micros.get((kind, 0), [])
        for kind in _COMPUTE_KINDS
        for stage in range(1, stages)
    )


# ---- the built-in schedules ----------------------------------------------------------------------------------------


def by_limit(limit: Limit) -> Order:
    """The order in which a backward runs as soon as the stage holds as many micro-batches as it may.

    One worker for each stage; both ways in the order of the micro-batches.  All built-in schedules are this one rule.
    """

    def order(stages: int, micros: int) -> list[Ascending]:
        held = [limit(stage, stages, micros) for stage in range(stages)]
        return [Ascending(stage, _kinds(most, micros)) for stage, most in enumerate(held)]

    return order


def _kinds(most: int, units: int) -> str:
    return _F * most + (_B + _F) * (units - most) + _B * most


def _all(stage: int, stages: int, micros: int) -> int:
    """GPipe (NeurIPS 2019, section 2.3)."""
    return micros


def _depth(stage: int, stages: int, micros: int) -> int:
    """1F1B (DAPPLE, PPoPP 2021, section 3.2; policy PA), which is PipeDream's order too (SOSP 2019)."""
    return min(micros, stages - stage)


def _twice_the_depth(stage: int, stages: int, micros: int) -> int:
    """1F1B whose longer warm-up hides slow messages (DAPPLE, section 3.3, policy PB)."""
    return min(micros, 2 * (stages - stage) - 1)


BUILT_IN = (
    Schedule("1f1b", by_limit(_depth), limit=_depth, warm_up=1),
    Schedule("1f1b-deep", by_limit(_twice_the_depth), limit=_twice_the_depth, warm_up=2),
    Schedule("gpipe", by_limit(_all), limit=_all, warm_up=1),
    Schedule("pipedream", by_limit(_depth), synchronous=False, limit=_depth, warm_up=1),
)
AUTOMATIC = tuple(schedule.name for schedule in BUILT_IN if schedule.synchronous)
"""What the planner compares when the schedule is left open: an asynchronous one computes something else."""

for _schedule in BUILT_IN:
    register(_schedule)
