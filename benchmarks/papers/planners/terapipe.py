"""TeraPipe's joint cut of a batch by rows and tokens (ICML 2021, section 3.4), over the slice lengths of autopart's
planner.

Micro-batches of b rows have the least sum S_b of their slices' times under a limit on the longest slice
(`autopart.passes.tokens.lengths`). A knapsack composes the batch of n rows: G[n] = min over b of G[n - b] + S_b.
autopart's planner uses one token cut for all micro-batches, as all published results of TeraPipe do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import NEVER, Ints, least_sum


@dataclass(frozen=True, slots=True)
class BatchCut:
    """A cut of a batch. micro_batches: rows and ends of the slices (in cells) of each, in order. total_ns: sum of all
    slices' times; slowest_ns: the longest; objective_ns: total_ns + others * slowest_ns."""

    micro_batches: tuple[tuple[int, tuple[int, ...]], ...]
    total_ns: int
    slowest_ns: int
    objective_ns: int


def cut_batch(times: Mapping[int, Ints], batch: int, others: float, eps_ns: int = 1) -> BatchCut:
    """Return the best cut of a batch by rows and tokens. times: for each allowed number of rows per micro-batch.

    Micro-batches with the same rows share one token cut; the largest come first. Raises UsageError if no numbers of
    rows compose the batch. eps_ns: each limit is this much below the longest slice of the last cut, which loses at
    most others * eps_ns. O(limits * (sizes * cells^2 + sizes * batch)).
    """
    limit = max(int(own[own < NEVER].max()) for own in times.values())
    best: BatchCut | None = None
    while True:
        walks = {rows: least_sum(own, limit) for rows, own in times.items()}
        total, chosen = _knapsack({rows: walk[1] for rows, walk in walks.items()}, batch)
        if total >= NEVER or (best is not None and total >= best.objective_ns):
            break
        slowest = max(walks[rows][2] for rows in chosen)
        if best is None or total + round(others * slowest) < best.objective_ns:
            micro_batches = tuple((rows, walks[rows][0]) for rows in chosen)
            best = BatchCut(micro_batches, total, slowest, total + round(others * slowest))
        limit = slowest - eps_ns
    if best is None:
        raise UsageError(f"no micro-batches of {', '.join(map(str, times))} rows make up a batch of {batch}")
    return best


def _knapsack(sums: Mapping[int, int], batch: int) -> tuple[int, list[int]]:
    """Return the least sum of times of micro-batches that compose the batch, and their rows, the largest first."""
    filled: list[tuple[int, list[int]]] = [(0, [])]
    for rows in range(1, batch + 1):
        ways = [(filled[rows - size][0] + sums[size], -size) for size in sums if size <= rows]
        least, size = min(ways, default=(NEVER, 0))
        filled.append((least, [-size, *filled[rows + size][1]]) if least < NEVER else (NEVER, []))
    return filled[batch][0], sorted(filled[batch][1], reverse=True)
