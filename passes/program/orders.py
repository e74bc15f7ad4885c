"""What an order of computes is: turns, the shape of a pipeline, where its stages run, and schedules.

A worker is what runs a set of stages: the ranks that have the same stages (replicas that take micro-batches in turn are
workers of their own).  Stages are placed on workers one by one, in a loop (stage s on worker s modulo the number of
workers: the interleaved stages of Megatron-LM, SC 2021, section 2.2) or as a V (there and back, and so on, so that one
worker has both the first stage and the last: Pipeline Parallelism with Controllable Memory, NeurIPS 2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopart.ir.actions import Action
from autopart.ir.errors import ProgramError, shortened
from autopart.ir.plan import Decision

Turn = tuple[str, int, int]
"""One compute: its kind, its stage and its unit: the micro-batch, or with s slices s * micro-batch + slice."""

ONE, LOOP, V = "one", "loop", "v"
"""Placements: one stage on each worker, several in a loop, several as a V."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of an order of computes.

    slices: of each micro-batch.  in_turn: for each stage, the number of replicas that take micro-batches in turn, 1 if
    none do; empty if no stage has any.  homes: for each stage the number of its worker, counted in the order of their
    first stages; empty if each stage has a worker of its own.  order: the computes of each worker as text, where the
    plan fixes them; empty if the schedule has them.  forward_only: stages without a backward.
    whole: stages whose backwards are not split.
    """

    stages: int
    micros: int
    slices: int = 1
    in_turn: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    order: tuple[str, ...] = ()
    forward_only: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @staticmethod
    def of(decision: Decision) -> Shape:
        """Return the shape of a decision's order."""
        periods = tuple(stage.division.period for stage in decision.stages)
        homes = homes_of([stage.ranks for stage in decision.stages])
        return Shape(
            len(periods),
            len(decision.micro_rows),
            decision.slices,
            periods,
            homes,
            decision.order,
            tuple([s for s, stage in enumerate(decision.stages) if stage.forward_only]),
            tuple([s for s, stage in enumerate(decision.stages) if stage.whole_backward]),
        )

    @property
    def alternates(self) -> bool:
        """Whether the replicas of any stage take micro-batches in turn."""
        return max(self.in_turn, default=1) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """For each stage, the replicas that take micro-batches in turn, 1 if none do."""
        return self.in_turn or (1,) * self.stages

    @property
    def workers(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker, ascending; replicas in turn of a stage count as one here."""
        homes = self.homes or tuple(range(self.stages))
        found: list[list[int]] = [[] for _ in range(1 + max(homes, default=-1))]
        for stage, home in enumerate(homes):
            found[home].append(stage)
        return tuple(map(tuple, found))


def homes_of(stage_ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the number of the worker of each stage; () if each has one of its own.  O(ranks of all stages)."""
    numbers: dict[frozenset[int], int] = {}
    homes = tuple([numbers.setdefault(frozenset(ranks), len(numbers)) for ranks in stage_ranks])
    return homes if len(numbers) < len(homes) else ()


def placed(placement: str, stages: int, workers: int) -> tuple[int, ...]:
    """Return the homes (`Shape.homes`) of these numbers of stages on workers; () if each worker has one stage."""
    if stages == workers:
        return ()
    rounds = [divmod(stage, workers) for stage in range(stages)]
    return tuple([workers - 1 - at if placement == V and lap % 2 else at for lap, at in rounds])


Order = Callable[[int, int], Iterable[Iterable[Action | str | Turn]]]
"""From (stages, micro-batches) to the computes of each worker in order: texts like "2F0", actions or turns."""
Limit = Callable[[int, int, int], int]
"""From (stage, stages, micro-batches) to the most micro-batches that the stage may have in flight."""
Turns = Callable[[Shape], Iterable[tuple[Turn, ...]]]
"""From a shape to the computes of each worker, those of replicas in turn one after the other."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named order of computes.

    synchronous: every step ends with the optimizer; else weights are updated while micro-batches are in flight; only
    `pipe.train` runs it, if it is PipeDream's or 2BW's.  limit: the most micro-batches in flight, which the verifier
    checks; None: no limit.  warm_up: micro-batches per stage after which the order repeats at an even pace; 0 if
    unknown.  placement: where it wants the stages ("one" on a worker, or several in a "loop" or as a "v").  splits:
    whether it runs a backward as two computes, I and W.  sliced: whether it has an order over slices of sequences.
    turns: of a built-in schedule, the order for any shape, of which `order` is a case.
    """

    name: str
    order: Order
    synchronous: bool = True
    limit: Limit | None = None
    warm_up: int = 0
    placement: str = ONE
    splits: bool = False
    sliced: bool = False
    turns: Turns | None = None


# ---- orders as text --------------------------------------------------------------------------------------------------

_COMPUTE = re.compile(r"(?<!\S)(\d+)([A-Z]+)(\d+)(?:\.(\d+))?(?!\S)")


def texts_of(orders: Iterable[Iterable[Turn]], slices: int = 1) -> tuple[str, ...]:
    """Return each worker's computes as text, like "0F0 0F1 0I0 0W0" (`Decision.order`).  O(computes)."""

    def text(turn: Turn) -> str:
        kind, stage, unit = turn
        micro, piece = divmod(unit, slices)
        return f"{stage}{kind}{micro}.{piece}" if piece else f"{stage}{kind}{micro}"

    return tuple(" ".join(map(text, turns)) for turns in orders)


def turns_of(texts: Iterable[str], slices: int = 1) -> Iterator[tuple[Turn, ...]]:
    """Yield the computes of each worker of an order that `texts_of` wrote.

    Raises ProgramError for a word that is not a compute.  O(computes).
    """
    for text in texts:
        found = _COMPUTE.findall(text)
        if len(found) < len(words := text.split()):
            wrong = next(word for word in words if not _COMPUTE.match(word))
            raise ProgramError(f"{shortened(wrong)!r} in the order of the plan is not a compute", why="2F0 is one")
        yield tuple([(kind, int(stage), int(micro) * slices + int(piece or 0)) for stage, kind, micro, piece in found])
