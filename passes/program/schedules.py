"""Schedules: the order in which each worker runs its forwards and backwards.

A schedule is a function of the numbers of stages and micro-batches that returns the order of computes of each worker.
Everything else (messages, the order of all actions, micro-batches in flight, times, the proof that it ends) is derived
from that order, so that a user's schedule needs nothing else.

gpipe, 2 stages, 3 micro-batches        1f1b
0F0 0F1 0F2 0B0 0B1 0B2                 0F0 0F1 0B0 0F2 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2

Sequences may be cut into slices (TeraPipe, ICML 2021, for fill-drain; Seq1F1B, NAACL 2025, for 1F1B).  A slice needs
the keys and values of the slices before it, and gets gradients from those after it, so the slices of a micro-batch go
back last in, first out; micro-batches go back first in, first out, as ever.  A stage holds s - 1 slices more than it
would hold micro-batches, each an s-th as large: (s + p - 1) / s sequences under 1F1B instead of p.

1f1b, 2 stages, 2 micro-batches of 2 slices
0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1

Replicas that take micro-batches in turn are workers of their own.  A pipeline then holds as many micro-batches as one
that has a stage for each of these replicas, and each replica its part of those of its stage: of r replicas, with R of
them from this stage to the end, ceil(R / r) under 1F1B (PipeDream, SOSP 2019, section 3.2).  With slices it holds as
many micro-batches, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Any

from autopart.ir.actions import ACTIONS, BACKWARD, COMPUTE, COMPUTES, FORWARD, IN_FLIGHT, Action, hands_on, parse_action
from autopart.ir.errors import ProgramError, UsageError
from autopart.ir.plan import Decision
from autopart.ir.printable import shortened

Turn = tuple[str, int, int]
"""One compute: its kind, its stage and its unit: the micro-batch, or with s slices s * micro-batch + slice."""

_F, _B = COMPUTES[FORWARD], COMPUTES[BACKWARD]
_COMPUTE_KINDS = tuple(name for name, kind in ACTIONS.items() if kind.role == COMPUTE)


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an order of computes.

    slices: of each micro-batch.  in_turn: for each stage, the number of replicas that take micro-batches in turn, 1 if
    none do; empty if no stage has any.
    """

    stages: int
    micros: int
    slices: int = 1
    in_turn: tuple[int, ...] = ()

    @staticmethod
    def of(decision: Decision) -> Shape:
        """Return the shape of a decision's order."""
        periods = tuple(stage.division.period for stage in decision.stages)
        return Shape(len(periods), len(decision.micro_rows), decision.slices, periods)

    @property
    def alternates(self) -> bool:
        """Whether the replicas of any stage take micro-batches in turn."""
        return max(self.in_turn, default=1) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """For each stage, the replicas that take micro-batches in turn, 1 if none do."""
        return self.in_turn or (1,) * self.stages


Order = Callable[[int, int], Iterable[Iterable[Action | str | Turn]]]
"""From (stages, micro-batches) to the computes of each worker in order: texts like "2F0", actions or turns."""
Limit = Callable[[int, int, int], int]
"""From (stage, stages, micro-batches) to the most micro-batches that the stage may have in flight."""

Update = Callable[[Mapping[str, Any]], None]
"""Updates the parameters of a stage, given by name, from their gradients."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named order of computes.

    synchronous: every step ends with the optimizer; else weights are updated while micro-batches are in flight, each
    with a copy of the weights that it began with.  limit: the most micro-batches in flight, which the verifier checks;
    None: no limit.  warm_up: micro-batches per stage after which the order repeats at an even pace; 0 if unknown.
    update: of an asynchronous schedule, called after each backward of a stage with its parameters, whose gradients are
    weighted as in the loss of the whole batch; without it the schedule can be planned but not run.  Updates of a step
    that fails later are kept.
    """

    name: str
    order: Order
    synchronous: bool = True
    limit: Limit | None = None
    warm_up: int = 0
    update: Update | None = None


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


def takes_slices(schedule: Schedule) -> bool:
    """Return whether a schedule has an order over slices."""
    return schedule in BUILT_IN and schedule.synchronous


def streams(schedule: Schedule) -> bool:
    """Return whether batches follow each other without a flush between them (`pipe.train`)."""
    return not schedule.synchronous and schedule in BUILT_IN


def most_held(schedule: Schedule, stage: int, shape: Shape) -> int | None:
    """Return the most micro-batches, or slices, that a rank of the stage may have in flight; None: no limit."""
    if schedule.limit is None:
        return None
    stages, micros, slices = shape.stages, shape.micros, shape.slices
    if streams(schedule):  # the next batch follows at once
        own = shape.replicas[stage]
        return -(-sum(shape.replicas[stage:]) // own)
    if shape.alternates and schedule in BUILT_IN:
        held, own = schedule.limit(0, sum(shape.in_turn[stage:]), micros), shape.in_turn[stage]
        return slices * min(-(-micros // own), -(-held // own))
    units = micros * slices
    return min(units, schedule.limit(stage, stages, units) + slices - 1)


def worker_orders(schedule: Schedule, shape: Shape) -> Iterator[tuple[Turn, ...]]:
    """Yield the computes of each worker: a stage, or one of its replicas that take micro-batches in turn.

    A user's schedule need not know such replicas: each runs its part of the stage's order.  Raises ProgramError for
    anything that is not a compute of this pipeline, and for slices if the schedule has no order over them.
    O(stages * micros * slices) for all workers.
    """
    if shape.slices > 1 and not takes_slices(schedule):
        raise ProgramError(
            f"schedule {schedule.name} has no order over slices of sequences",
            fix=f"use one of {', '.join(AUTOMATIC)}, or token_slices=None",
        )
    of = shape.replicas
    if schedule in BUILT_IN:
        for stage, replicas in enumerate(of):
            yield from (_own_turns(schedule, stage, replica, shape) for replica in range(replicas))
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


def _own_turns(schedule: Schedule, stage: int, replica: int, shape: Shape) -> tuple[Turn, ...]:
    """Return the computes of one replica of a stage under a built-in schedule; see the head of this module.

    A backward runs as soon as the replica holds as many slots as it may.
    """
    slices, micros = shape.slices, range(replica, shape.micros, shape.replicas[stage])
    forward = [(_F, stage, micro * slices + piece) for micro in micros for piece in range(slices)]
    backward = [(_B, stage, micro * slices + piece) for micro in micros for piece in reversed(range(slices))]
    ahead = min(most_held(schedule, stage, shape) or 0, len(forward))
    steady = [turn for pair in zip(backward, forward[ahead:], strict=False) for turn in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


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

    Built-in schedules hold as many as they may; of others it is counted.  O(stages * micros).
    """
    if schedule in BUILT_IN:
        return most_held(schedule, stage, shape) or 0
    return most_tokens(schedule, stage, shape, (1,) * shape.slices)


@lru_cache(maxsize=4096)
def most_tokens(schedule: Schedule, stage: int, shape: Shape, lengths: tuple[int, ...]) -> int:
    """Return the most tokens whose activations a rank of a stage holds.  lengths: of the slices.

    O(stages * micros * slices).
    """
    most = 0
    for order in pattern(schedule, shape).workers:
        units = [(kind, unit) for kind, at, unit in order if at == stage]
        held = (IN_FLIGHT[kind] * lengths[unit % len(lengths)] for kind, unit in units)
        most = max(most, *accumulate(held, initial=0))
    return most


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
    return Pattern(shape, orders, whole and _in_one_order(orders, shape.stages))


def _in_one_order(orders: Iterable[Iterable[Turn]], stages: int) -> bool:
    """Return whether all stages take the micro-batches in one order forward, and in one order backward."""
    micros: dict[tuple[str, int], list[int]] = {}
    for turns in orders:
        for kind, stage, micro in turns:
            micros.setdefault((hands_on(kind), stage), []).append(micro)
    return all(
        micros.get((kind, stage), []) == micros.get((kind, 0), [])
        for kind in COMPUTES.values()
        for stage in range(1, stages)
    )


# ---- the built-in schedules ----------------------------------------------------------------------------------------


def _all(stage: int, stages: int, micros: int) -> int:
    """GPipe (NeurIPS 2019, section 2.3)."""
    return micros


def _depth(stage: int, stages: int, micros: int) -> int:
    """1F1B (DAPPLE, PPoPP 2021, section 3.2; policy PA), which is PipeDream's order too (SOSP 2019)."""
    return min(micros, stages - stage)


def _twice_the_depth(stage: int, stages: int, micros: int) -> int:
    """1F1B whose longer warm-up hides slow messages (DAPPLE, section 3.3, policy PB)."""
    return min(micros, 2 * (stages - stage) - 1)


def _built_in(name: str, limit: Limit, warm_up: int = 1, *, synchronous: bool = True) -> Schedule:
    """Return the schedule with a limit of micro-batches in flight; all built-in schedules follow this rule."""

    def order(stages: int, micros: int) -> list[tuple[Turn, ...]]:
        return list(worker_orders(schedule, Shape(stages, micros)))

    schedule = Schedule(name, order, synchronous, limit, warm_up)
    return schedule


STASHED, DELAYED = "pipedream", "pipedream-2bw"
"""PipeDream with weight stashing (Harlap et al., SOSP 2019, section 3.3), and with two versions of the weights
(Narayanan et al., ICML 2021)."""

BUILT_IN = (
    _built_in("1f1b", _depth),
    _built_in("1f1b-deep", _twice_the_depth, warm_up=2),
    _built_in("gpipe", _all),
    _built_in(STASHED, _depth, synchronous=False),
    _built_in(DELAYED, _depth, synchronous=False),
)
AUTOMATIC = tuple(schedule.name for schedule in BUILT_IN if schedule.synchronous)
"""The schedules that the planner compares for "auto": an asynchronous one computes other gradients."""

for _schedule in BUILT_IN:
    register(_schedule)
