"""Cuts that give every stage about as much work, for any number of stages on a rank.

The dynamic program of `partition` has one stage for each position.  With several of them the pipeline fills evenly and
what counts is the work of all stages of a rank, and the longest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations, pairwise

import numpy as np
import numpy.typing as npt

from autopart.ir.size import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.space import SearchSpace, fastest_sums

EVEN = 8
"""Even cuts may be off by one in so many of a device's share of the work, where fewer bytes cross."""
MOVES = 400
"""The most moves to level the loads of ranks."""
WINDOW, CHEAP = 12, 5.1
"""Blocks by which a cut may move at once, and how many times the bytes of the cheapest place there may cross it."""

Floats = npt.NDArray[np.float64]


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


def levelled(
    space: SearchSpace, rows: int, bounds: tuple[int, ...], homes: Sequence[int], pace: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return bounds with cuts moved as long as the times of ranks get more even (the sum of their squares).

    One cut moves at a time, or two that lie between the same two ranks: where blocks are large, only the difference of
    two moves is small.  homes: position of each stage.  pace: of each position, how much longer than its blocks it
    takes, such as for recomputation; (): all alike.  O(moves * stages * window^2) in numpy.
    """
    sums, crossing = fastest_sums(space, rows), space.chain.range_costs(Size(rows)).crossing
    factor = np.array(pace or (1.0,) * (max(homes) + 1))
    cuts, loads = list(bounds), np.zeros(len(factor))
    for home, (a, b) in zip(homes, pairwise(cuts), strict=True):
        loads[home] += sums[b] - sums[a]
    between: dict[tuple[int, int], list[int]] = {}
    for place in range(1, len(cuts) - 1):
        left, right = homes[place - 1], homes[place]
        if left != right:
            between.setdefault((min(left, right), max(left, right)), []).append(place)
    known: dict[tuple[int, int], tuple[float, dict[int, int]]] = {}
    for _ in range(MOVES):
        for pair, places in between.items():
            if pair not in known:
                choices = [_choices(space, cuts, sums, crossing, place, homes[place - 1] == pair[0]) for place in places]
                known[pair] = _best_move(pair, dict(zip(places, choices, strict=True)), loads, factor)
        pair, (gain, moved) = min(known.items(), key=lambda item: item[1][0], default=((0, 0), (0.0, {})))
        if gain >= 0:
            break
        for place, to in moved.items():
            taken = sums[cuts[place]] - sums[to]
            loads[homes[place - 1]] -= taken
            loads[homes[place]] += taken
            cuts[place] = to
        known = {other: best for other, best in known.items() if not set(other) & set(pair)}
    return tuple(cuts)


def _choices(
    space: SearchSpace, cuts: Sequence[int], sums: Ints, crossing: Ints, place: int, forward: bool
) -> tuple[Ints, Ints]:
    """Return where a cut may go, its own place first, and the work that this takes from the first rank of its pair.

    forward: whether the first rank of the pair has the stage before the cut.
    """
    here, low, high = cuts[place], cuts[place - 1] + 1, cuts[place + 1]
    near = np.arange(max(low, here - WINDOW), min(high, here + WINDOW + 1))
    before, after = space.legal_at(place - 1), space.legal_at(place)
    good = before[cuts[place - 1], near] & after[near, cuts[place + 1]]
    near = near[good & (crossing[near] <= CHEAP * crossing[near].min())]
    near = np.concatenate([[here], near[near != here]])
    taken = sums[here] - sums[near]
    return near, taken if forward else -taken


def _best_move(
    pair: tuple[int, int], choices: Mapping[int, tuple[Ints, Ints]], loads: Floats, factor: Floats
) -> tuple[float, dict[int, int]]:
    """Return the change of the sum of squared times, and the new places of one or two cuts of a pair of ranks."""
    (one, other), found = pair, (0.0, dict[int, int]())
    weights = factor[one] ** 2, factor[other] ** 2
    groups = list(combinations(choices, 2)) if len(choices) > 1 else [(place, place) for place in choices]
    for first, second in groups:
        near, taken = choices[first]
        others, more = choices[second] if first != second else (near[:1], taken[:1])
        moved = taken[:, None] + more[None, :]
        change = weights[0] * moved * (moved - 2 * loads[one]) + weights[1] * moved * (moved + 2 * loads[other])
        at = np.unravel_index(int(change.argmin()), change.shape)
        if change[at] < found[0]:
            places = {second: int(others[at[1]])} | {first: int(near[at[0]])}
            found = float(change[at]), places
    return found
