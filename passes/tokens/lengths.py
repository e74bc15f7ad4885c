"""The lengths of token slices that minimise the time of a pipeline.

With stages that take alpha_k * t for a slice of time t, in a fill-drain order, minimise over cuts of the tokens

    alpha_max * sum of t over all slices of all micro-batches  +  (sum of the other alphas) * the longest t

This is TeraPipe's objective (ICML 2021, section 3.3) for unequal stages; for equal ones it is the exact makespan.  t
depends on the length of a slice and its context: later slices see more tokens, so the best cuts begin with long slices.
Times here are those of the slowest stage, and `others` is (sum of the other alphas) / alpha_max.

For a limit T on the longest t, the least sum is a shortest path over the cells c of the sequence:

    S[0] = 0,   S[c + k] = min over c of S[c] + t[c, k]   where t[c, k] <= T

S never grows with T, so the sum of a solved T is a lower bound for all lower T.  Limits that cannot win by this bound
are not solved; the answer is exact over all T.

Assumed: stages differ by one factor for all slices (else, at 20% imbalance, the objective is 2.5% above the simulated
time on average), and forward and backward are one time (0.2% on average).  So the result is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError

Ints = npt.NDArray[np.int64]
SliceCost = Callable[[int, Ints, Ints], npt.ArrayLike]
"""(rows, lengths, contexts) to the nanoseconds of a slice on the slowest stage, forward, backward and messages."""

NEVER = 1 << 58
"""Larger than any time; the sum of two still fits 64 bits."""
_AT_ONCE = 64
"""Limits that are solved together."""


@dataclass(frozen=True, slots=True)
class TokenCut:
    """micro_batches: rows and slice lengths (in tokens) of each, in order.  total_ns: sum of all slices' times;
    slowest_ns: the longest; objective_ns: total_ns + others * slowest_ns."""

    micro_batches: tuple[tuple[int, tuple[int, ...]], ...]
    total_ns: int
    slowest_ns: int
    objective_ns: int

    @property
    def sliced(self) -> bool:
        """Whether any sequence is cut at all."""
        return any(len(lengths) > 1 for _, lengths in self.micro_batches)


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """Nanoseconds of every slice of a sequence of `tokens`, cut in cells of `step` tokens, the last one shorter.

    ns[c, k]: of the k cells after the first c; NEVER if there is no such slice.
    """

    tokens: int
    step: int
    ns: Ints

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self.ns)

    def lengths(self, ends: Sequence[int]) -> tuple[int, ...]:
        """The lengths in tokens of slices that end at these cells."""
        places = [0, *(min(end * self.step, self.tokens) for end in ends)]
        return tuple(b - a for a, b in pairwise(places))


def slice_times(cost: SliceCost, rows: int, tokens: int, step: int = 8, shortest: int = 1) -> SliceTimes:
    """Times in nanoseconds of all slices of micro-batches of `rows` rows.

    step: lengths are multiples of it, except the last.  shortest: the least tokens of a slice, except the whole
    sequence.  Raises UsageError for a size below 1.  O(cells^2) and one call of `cost`.
    """
    if min(rows, tokens, step) < 1:
        raise UsageError(f"{rows} rows of {tokens} tokens in steps of {step}", why="each has to be at least 1")
    cells = -(-tokens // step)
    first, count = np.arange(cells)[:, None], np.arange(cells + 1)[None, :]
    contexts = np.broadcast_to(first * step, (cells, cells + 1))
    lengths = np.minimum((first + count) * step, tokens) - contexts
    there = (count > 0) & (first + count <= cells) & ((lengths >= shortest) | (count == cells))
    ns = np.full(lengths.shape, NEVER, dtype=np.int64)
    ns[there] = np.rint(np.asarray(cost(rows, lengths[there], contexts[there]), dtype=np.float64)).astype(np.int64)
    return SliceTimes(tokens, step, ns)


def other_stages(stage_ns: Sequence[int]) -> float:
    """`others` of stages that take these times for one slice: K - 1 if they are equal."""
    most = max(stage_ns)
    return (sum(stage_ns) - most) / most if most else float(len(stage_ns) - 1)


def cut_tokens(times: SliceTimes, micros: int, others: float) -> TokenCut:
    """The best cut that `micros` equal micro-batches share; one slice if no cut is better.

    O(limits solved * cells^2), in numpy over 64 limits; of cells^2 / 2 limits usually some hundred are solved.
    """

    def totals(limits: Ints) -> Ints:
        return np.minimum(micros * least_sums(times, limits)[:, -1], NEVER)

    limit = best_limit(limits_of(times), totals, others)
    whole = times.ns[0, -1]
    lengths, own_ns, slowest_ns = best_path(times, limit)
    if (micros + others) * whole <= micros * own_ns + others * slowest_ns:
        lengths, own_ns, slowest_ns = (times.tokens,), int(whole), int(whole)
    total = micros * own_ns
    return TokenCut(((1, lengths),) * micros, total, slowest_ns, objective(total, slowest_ns, others))


def objective(total_ns: int, slowest_ns: int, others: float) -> int:
    """The time of the pipeline, in ns."""
    return total_ns + round(others * slowest_ns)


def limits_of(times: SliceTimes) -> Ints:
    """All times that may be the longest, ascending."""
    return np.unique(times.ns[times.ns < NEVER])


def best_limit(limits: Ints, totals: Callable[[Ints], Ints], others: float) -> int:
    """The limit with the least total + others * limit, the largest of equals; at least one is feasible."""
    first = np.unique(np.linspace(0, len(limits) - 1, _AT_ONCE).round().astype(np.int64))
    sums = totals(limits[first])
    feasible = sums < NEVER
    values = np.where(feasible, sums + others * limits[first], np.inf)
    at = int(np.flatnonzero(values == values.min())[-1])
    best, answer = values[at], int(limits[first[at]])
    # Between two solved limits: (the lowest unsolved, the highest unsolved, the sum of the solved one above).
    gaps = list(zip(first[:-1] + 1, first[1:] - 1, sums[1:], strict=True))
    while True:
        gaps = [(a, b, top) for a, b, top in gaps if a <= b and top < NEVER and top + others * limits[a] < best]
        if not gaps:
            return answer
        gaps.sort(key=lambda gap: gap[2] + others * limits[gap[0]])
        now, gaps = gaps[:_AT_ONCE], gaps[_AT_ONCE:]
        middle = np.array([(a + b) // 2 for a, b, _ in now])
        for (a, b, top), m, own in zip(now, middle, totals(limits[middle]), strict=True):
            gaps += [(a, m - 1, own), (m + 1, b, top)]
            if own < NEVER and own + others * limits[m] < best:
                best, answer = own + others * limits[m], int(limits[m])


def least_sums(times: SliceTimes, limits: Ints) -> Ints:
    """S for each limit: [limit, cell] is the least sum of times up to that cell, NEVER if no cut keeps the limit."""
    cells = times.cells
    found = np.full((len(limits), cells + 1), NEVER, dtype=np.int64)
    found[:, 0] = 0
    most = limits.max()
    columns = limits[:, None]
    for cell in range(cells):
        row = times.ns[cell, 1 : cells - cell + 1]
        allowed = np.flatnonzero(row <= most)
        if not len(allowed):
            continue
        reach = int(allowed[-1]) + 1
        row = row[None, :reach]
        step = np.where(row <= columns, row, NEVER)
        step += found[:, cell, None]
        ahead = found[:, cell + 1 : cell + 1 + reach]
        np.minimum(ahead, step, out=ahead)
    return found


def best_path(times: SliceTimes, limit: int) -> tuple[tuple[int, ...], int, int]:
    """(lengths in tokens, sum, longest) of the best path under a limit; of equal ones that with short last slices."""
    sums = least_sums(times, np.array([limit]))[0]
    ends: list[int] = []
    slowest, cell = 0, times.cells
    while cell:
        before = np.arange(cell)
        taken = times.ns[before, cell - before]
        fits = (taken <= limit) & (sums[:cell] + taken == sums[cell])
        start = int(np.flatnonzero(fits)[-1])
        slowest = max(slowest, int(taken[start]))
        ends.append(cell)
        cell = start
    return times.lengths(ends[::-1]), int(sums[-1]), slowest
