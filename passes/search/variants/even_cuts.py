"""Cuts that give every stage about as much work, for any number of stages on a rank.

The dynamic program of `partition` has one stage for each position.  With several of them the pipeline fills evenly and
what counts is the work of all stages of a rank, and the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.space import SearchSpace, fastest_sums

EVEN = 8
"""Even cuts may be off by one in so many of a device's share of the work, where fewer bytes cross."""
MOVES = 400
"""The most moves of a cut to level the loads of ranks."""


def even_bounds(space: SearchSpace, rows: int, shares: Sequence[int]) -> tuple[int, ...] | None:
    """Return the bounds of stages with work in proportion to their shares, cut where few bytes cross.

    rows: of a micro-batch.  None where the blocks do not suffice.  O(stages * blocks).
    """
    sums, crossing = fastest_sums(space, rows), space.chain.range_costs(Size(rows)).crossing
    whole, bounds = sum(shares), [0]
    for done in accumulate(shares[:-1]):
        first = bounds[-1] + 1  # the boundaries that are left
        off = np.abs(sums[first:-1] - sums[-1] * done / whole)
        if not len(off):
            return None
        near = np.flatnonzero(off <= max(off.min(), sums[-1] / whole / EVEN))
        bounds.append(first + int(min(near, key=lambda i: (crossing[first + i], off[i]))))
    return (*bounds, space.chain.n)


def shortest_bounds(space: SearchSpace, rows: int, stages: int) -> tuple[int, ...] | None:
    """Return the bounds for which the longest stage is shortest, of those that the request allows; None without any.

    Of equally short ones every stage ends as late as possible.  rows: of a micro-batch.  O(stages * blocks^2) in numpy.
    """
    n, sums = space.chain.n, fastest_sums(space, rows)
    work = sums[None, :] - sums[:, None]
    far = int(sums[-1]) + 1
    best: list[Ints] = [np.full(n + 1, far, dtype=np.int64)]
    best[0][n] = 0
    for k in range(1, stages + 1):  # the last k stages, from block a on
        allowed = np.where(space.legal_at(stages - k), work, far)
        best.append(np.maximum(allowed, best[-1][None, :]).min(axis=1))
    if best[stages][0] >= far:
        return None
    bounds, limit = [0], int(best[stages][0])
    for stage in range(stages):
        legal, rest, a = space.legal_at(stage)[bounds[-1]], best[stages - stage - 1], bounds[-1]
        bounds.append(int(np.flatnonzero(legal & (work[a] <= limit) & (rest <= limit)).max()))
    return tuple(bounds)


def levelled(space: SearchSpace, rows: int, bounds: tuple[int, ...], homes: Sequence[int]) -> tuple[int, ...]:
    """Return bounds with cuts moved by a block as long as the loads of ranks get more even (the sum of their squares).

    homes: position of each stage.  O(moves * stages).
    """
    sums = fastest_sums(space, rows).tolist()
    cuts, loads = list(bounds), [0] * (max(homes) + 1)
    for home, (a, b) in zip(homes, pairwise(cuts), strict=True):
        loads[home] += sums[b] - sums[a]
    for _ in range(MOVES):
        gain, place, moved = min(_moves(space, cuts, sums, loads, homes), default=(0, 0, 0))
        if gain >= 0:
            break
        taken = sums[moved] - sums[cuts[place]]
        loads[homes[place - 1]] += taken
        loads[homes[place]] -= taken
        cuts[place] = moved
    return tuple(cuts)


def _moves(
    space: SearchSpace, cuts: Sequence[int], sums: Sequence[int], loads: Sequence[int], homes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (change of the sum of squared loads, place of a cut, block that it moves to) of each move."""
    for place in range(1, len(cuts) - 1):
        giver, taker, here = homes[place], homes[place - 1], cuts[place]
        for moved in (here + 1, here - 1):
            if giver == taker or not cuts[place - 1] < moved < cuts[place + 1]:
                continue
            taken = sums[moved] - sums[here]
            change = 2 * taken * (loads[taker] - loads[giver] + taken)
            before, after = space.legal_at(place - 1), space.legal_at(place)
            if change < 0 and before[cuts[place - 1], moved] and after[moved, cuts[place + 1]]:
                yield change, place, moved
