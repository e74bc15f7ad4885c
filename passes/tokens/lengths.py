"""The lengths of token slices that minimise the time of a pipeline.

With stages that take alpha_k * t for a slice of time t, in a fill-drain order, minimise over cuts of the tokens

    alpha_max * sum of t over all slices of all micro-batches  +  (sum of the other alphas) * the longest t

This is TeraPipe's objective (ICML 2021, section 3.3) for unequal stages; for equal ones it is the exact makespan.  t
depends on the length of a slice and its context: later slices see more tokens, so the best cuts begin with long slices.
Times here are those of the slowest stage, and `others` is (sum of the other alphas) / alpha_max.

For a limit T on the longest t, the least sum is a shortest path over the cells c of the sequence:

    S[0] = 0,   S[d] = min over c < d of S[c] + t[c, d]   where t[c, d] <= T

A path is the best one for all limits down to its own longest t.  So the limits are tried from the highest on, each just
below the longest t of the path before, and the answer is exact over all T.

Assumed: stages differ by one factor for all slices (else, at 20% imbalance, the objective is 2.5% above the simulated
time on average), and forward and backward are one time (0.2% on average).  So the result is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
SliceCost = Callable[[Ints, Ints], npt.ArrayLike]
"""(lengths, contexts) to the nanoseconds of a slice on the slowest stage, forward, backward and messages."""

NEVER = 1 << 58
"""Larger than any time; the sum of two still fits 64 bits."""


def slice_times(cost: SliceCost, tokens: int, step: int) -> Ints:
    """Nanoseconds of all slices of a sequence in cells of `step` tokens, the last one shorter.

    [c, d]: of the slice from cell c up to cell d; NEVER where there is none.  O(cells^2) and one call of `cost`.
    """
    places = np.minimum(np.arange(-(-tokens // step) + 1) * step, tokens)
    contexts, ends = np.meshgrid(places[:-1], places, indexing="ij")
    there = ends > contexts
    ns = np.full(there.shape, NEVER, dtype=np.int64)
    taken = np.asarray(cost((ends - contexts)[there], contexts[there]), dtype=np.float64)
    ns[there] = np.rint(taken).astype(np.int64)
    return ns


def other_stages(stage_ns: Sequence[int]) -> float:
    """`others` of stages that take these times for one slice: K - 1 if they are equal."""
    most = max(stage_ns)
    return (sum(stage_ns) - most) / most if most else float(len(stage_ns) - 1)


def cut_tokens(ns: Ints, micros: int, others: float) -> tuple[int, ...]:
    """The cells at which the slices of the best cut end that `micros` equal micro-batches share; of equally good
    ones that with the longest slice.  ns: as `slice_times`.  O(different least sums * cells^2)."""
    limit = int(ns[0, -1])
    best, answer = (micros + others) * limit, tuple([len(ns)])
    while True:
        ends, total, slowest = least_sum(ns, limit)
        if micros * total >= best:
            return answer
        if micros * total + others * slowest < best:
            best, answer = micros * total + others * slowest, ends
        limit = slowest - 1


def least_sum(ns: Ints, limit: int) -> tuple[tuple[int, ...], int, int]:
    """(ends in cells, sum, longest) of the cut with the least sum under a limit, of equal ones that with short last
    slices; the sum is NEVER if no cut keeps the limit.  O(cells^2)."""
    allowed = np.where(ns <= limit, ns, NEVER)
    sums, starts = np.zeros(len(ns) + 1, dtype=np.int64), [0]
    for end in range(1, len(ns) + 1):
        found = sums[:end] + allowed[:end, end]
        starts.append(end - 1 - int(found[::-1].argmin()))
        sums[end] = min(found[starts[end]], NEVER)
    ends = [len(ns)]
    while starts[ends[-1]]:
        ends.append(starts[ends[-1]])
    slowest = max(int(ns[starts[end], end]) for end in ends)
    return tuple(reversed(ends)), int(sums[-1]), slowest
