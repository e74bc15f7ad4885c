"""TeraPipe's joint cut of a batch by rows and tokens (ICML 2021, section 3.4), over the slice lengths of autopart's
planner.

Micro-batches of b rows have the least sum S_b of their slices' times under a limit on the longest slice
(`autopart.passes.tokens.lengths`). A knapsack composes the batch of n rows: G[n] = min over b of G[n - b] + S_b[end].
autopart's planner uses one token cut for all micro-batches, as all published results of TeraPipe do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import (
    NEVER,
    Ints,
    SliceTimes,
    TokenCut,
    best_limit,
    best_path,
    least_sums,
    limits_of,
    objective,
)


def cut_batch(times: Mapping[int, SliceTimes], batch: int, others: float, eps_ns: int = 0) -> TokenCut:
    """Return the best cut of a batch by rows and tokens. times: for each allowed number of rows per micro-batch.

    Micro-batches with the same rows share one token cut; the largest come first. Raises UsageError if no numbers of
    rows compose the batch. eps_ns: of limits that differ by less only the largest is tried, which loses at most
    others * eps_ns. O(limits solved * (sizes * cells^2 + sizes * batch)).
    """
    sizes = sorted(times)

    def totals(limits: Ints) -> Ints:
        return _knapsack(sizes, {rows: least_sums(own, limits)[:, -1] for rows, own in times.items()}, batch)[:, -1]

    candidates = _clusters(np.unique(np.concatenate([limits_of(own) for own in times.values()])), eps_ns)
    if totals(candidates[-1:])[0] >= NEVER:
        raise UsageError(f"no micro-batches of {', '.join(map(str, sizes))} rows make up a batch of {batch}")
    limit = best_limit(candidates, totals, others)
    limits = np.array([limit])
    best = {rows: least_sums(own, limits)[:, -1] for rows, own in times.items()}
    filled = _knapsack(sizes, best, batch)[0]
    chosen: list[int] = []
    left = batch
    while left:
        rows = next(b for b in reversed(sizes) if b <= left and filled[left] == filled[left - b] + best[b][0])
        chosen.append(rows)
        left -= rows
    walks = {rows: best_path(times[rows], limit) for rows in set(chosen)}
    chosen.sort(reverse=True)
    slowest = max(slowest_ns for _, _, slowest_ns in walks.values())
    micro_batches = tuple((rows, walks[rows][0]) for rows in chosen)
    total = int(filled[batch])
    return TokenCut(micro_batches, total, slowest, objective(total, slowest, others))


def _clusters(limits: Ints, eps_ns: int) -> Ints:
    """The largest of the limits within eps of the first of a cluster, ascending."""
    if eps_ns <= 0:
        return limits
    kept, at = [], 0
    while at < len(limits):
        at = int(np.searchsorted(limits, limits[at] + eps_ns, side="right"))
        kept.append(limits[at - 1])
    return np.array(kept, dtype=np.int64)


def _knapsack(sizes: Sequence[int], best: Mapping[int, Ints], batch: int) -> Ints:
    """Return G, [limit, rows], the least sum of times of micro-batches that compose that many rows."""
    filled = np.full((len(best[sizes[0]]), batch + 1), NEVER, dtype=np.int64)
    filled[:, 0] = 0
    for rows in range(1, batch + 1):
        for size in sizes:
            if size <= rows:
                filled[:, rows] = np.minimum(filled[:, rows], filled[:, rows - size] + best[size])
    return filled
