"""What the stages of a worker hold for their backwards, at every time of its order.

A stage holds the activations of a slot from F to the end of B, or to I, and from I to W what W needs.  The bytes that a
worker holds after a compute are a sum over its stages, so the most bytes follow from how many slots of each stage are
between F and I, and between I and W, after each of its computes.  Few such counts are different, and they depend on the
order alone: they are found once for all candidates of a search that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from autopart.ir.actions import HOLDING
from autopart.ir.plan import Estimate
from autopart.passes.graph.cuts import Ints
from autopart.passes.program.orders import Schedule, Shape, Turn
from autopart.passes.program.schedules import Pattern, pattern
from autopart.passes.simulation.charges import StageContext

Counts = Mapping[tuple[int, ...], Ints]
"""By the stages of a worker, ascending: a row for each different state; of each stage first the slots between F and I,
then of each stage those between I and W.  With slices of tokens: tokens instead of slots."""


@lru_cache(maxsize=64)
def counts_of(schedule: Schedule, shape: Shape, lengths: tuple[int, ...] = ()) -> Counts:
    """Return the counts of a schedule's own order.  lengths: tokens of the slices.  O(stages * micros * slices)."""
    return counts_in(pattern(schedule, shape), lengths)


def counts_in(order: Pattern, lengths: tuple[int, ...] = ()) -> Counts:
    """Return the counts of an order of computes.  lengths: tokens of the slices.  O(turns log turns)."""
    found: dict[tuple[int, ...], Ints] = {}
    for turns in order.workers:
        stages = tuple(sorted({stage for _, stage, _ in turns}))
        rows = _rows(_closed(turns, order.shape), stages, lengths)
        found[stages] = np.concatenate([found[stages], rows]) if stages in found else rows
    return {stages: np.unique(rows, axis=0) for stages, rows in found.items()}


def _closed(turns: Sequence[Turn], shape: Shape) -> Sequence[Turn]:
    """Return the computes with a backward right behind the forwards of each micro-batch on stages without a backward,
    which hold nothing afterwards."""
    if not shape.forward_only:
        return turns
    closed: list[Turn] = []
    for kind, stage, unit in turns:
        closed.append((kind, stage, unit))
        if stage in shape.forward_only and unit % shape.slices == shape.slices - 1:
            closed += [("B", stage, unit - piece) for piece in range(shape.slices)]
    return closed


def _rows(turns: Sequence[Turn], stages: tuple[int, ...], lengths: tuple[int, ...]) -> Ints:
    column = {stage: place for place, stage in enumerate(stages)}
    changes = np.zeros((len(turns), 2 * len(stages)), dtype=np.int64)
    for row, (kind, stage, unit) in enumerate(turns):
        size = lengths[unit % len(lengths)] if lengths else 1
        held, kept = HOLDING[kind]
        changes[row, column[stage]] = held * size
        changes[row, len(stages) + column[stage]] = kept * size
    return np.unique(np.cumsum(changes, axis=0), axis=0)


def of_stage(counts: Counts, stage: int) -> tuple[tuple[int, int], ...]:
    """Return (held, kept) of one stage, those that another state exceeds in both left out; most held first.

    O(states log states).
    """
    pairs: set[tuple[int, int]] = set()
    for stages, rows in counts.items():
        if stage in stages:
            at = stages.index(stage)
            pairs.update(map(tuple, rows[:, [at, len(stages) + at]].tolist()))
    front: list[tuple[int, int]] = []
    for held, kept in sorted(pairs, reverse=True):
        if not front or kept > front[-1][1]:
            front.append((held, kept))
    return tuple(front)


def most_bytes(rows: Ints, held_bytes: Sequence[int], kept_bytes: Sequence[int], tokens: int = 1) -> int:
    """Return the most bytes that a worker holds.

    rows: of its counts.  held_bytes, kept_bytes: of a slot of each of its stages.  tokens: of a slot, where rows count
    tokens.  O(states * stages).
    """
    amounts = np.array([*held_bytes, *kept_bytes], dtype=np.int64)
    return -(-int((rows @ amounts).max(initial=0)) // tokens)


def own_bytes(context: StageContext, estimate: Estimate) -> int:
    """Return the bytes of a stage besides what it holds for backwards, and its workspace."""
    held = context.in_flight_bytes(estimate.activation_bytes, estimate.weight_bytes)
    return estimate.peak_bytes - held - estimate.workspace_bytes
