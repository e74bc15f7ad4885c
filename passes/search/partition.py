"""The partition: where the line of blocks is cut into stages, and how many devices each stage gets.

For a pipeline of at most D positions, minimise over cuts 0 = c_0 < ... < c_S = n and widths r_1 .. r_S

    U = max( max over stages s of ( sum of through_q over q < s + own_s ), sum of through_q over all q )

own_s: what stage s needs for all its micro-batches, and for what follows them; through_q: what one micro-batch needs
through stage q, forward and backward, messages into it included.  So U is the time until the slowest stage is done,
when the first micro-batch has to reach it and the last one has to come back from it; it is the time of a step when
stages never wait in between (DAPPLE's latency, PPoPP 2021, section 4.1, with every stage tried as the pivot).

State: stages left k, devices they use d, first block a.  Recurrence, backwards from the end:

    U[k, d, a] = min over r, b of max( own(a, b), through(a, b) + U[k - 1, d - r, b] )

exact, because U grows with what it is made of.  k and d are known when a stage is costed, so micro-batches in flight
and the place of the stage in the cluster are too.  Tables hold ranges by first block and length, so that where only
short ranges come into question they are narrow: O(S * D * widths * n * length) in numpy, without D and widths when
every width is 1.

Assumed, and wrong where: stages wait in between (slow messages, few micro-batches in flight, uneven stages); the
simulator judges what comes out of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopart.passes.graph.cuts import Ints

_T = TypeVar("_T", bound=np.generic)

INFEASIBLE = 1 << 58
"""More than any time or memory; FAR + FAR + FAR still fits 64 bits."""

Table = tuple[Ints, Ints]
"""(own, through) over (a, b - a): nanoseconds; FAR in `own` where the stage cannot be, also where b > n."""
TableOf = Callable[[int, int, int], Table | None]
"""(k: place from the end, from 1; width; devices from its first one to the end) to its table; None: never."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Stage s is blocks[bounds[s]:bounds[s + 1]] on widths[s] devices; value: U in nanoseconds.  first: the position
    that the first stage begins at."""

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    value: int
    first: int = 0

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.widths)

    def ranges(self) -> list[tuple[int, int, int, int]]:
        """(first block, block after the last, first position, width) of each stage."""
        starts = [self.first + sum(self.widths[:s]) for s in range(self.stages)]
        ranges = zip(pairwise(self.bounds), starts, self.widths, strict=True)
        return [(a, b, start, width) for (a, b), start, width in ranges]


def by_length(matrix: npt.NDArray[_T], length: int) -> npt.NDArray[_T]:
    """A matrix over (a, b) as one over (a, b - a), for ranges of at most `length`; past the end that of (a, n)."""
    n = len(matrix) - 1
    return matrix[np.arange(n + 1)[:, None], ends_of(n, length)]


def ends_of(n: int, length: int) -> Ints:
    """[a, i]: a + i, but at most n."""
    return np.asarray(np.minimum(np.arange(n + 1)[:, None] + np.arange(length + 1)[None, :], n))


def solve_partition(
    n: int, depth: int, widths: Sequence[int], most: int, table_of: TableOf, *, spare: int = 0
) -> list[Partition]:
    """The best division for each number of stages (at most `most`) and each first position that has one.

    spare: so many positions at the end may idle; otherwise the stages stand on the last positions.
    """
    done = np.full(n + 1, INFEASIBLE, dtype=np.int64)
    done[n] = 0
    best: dict[tuple[int, int], Ints] = {(0, idle): done for idle in range(spare + 1)}
    choice: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    blocks = np.arange(n + 1)
    for k in range(1, min(most, depth, n) + 1):
        reached = {used + width for before, used in best if before == k - 1 for width in widths}
        for used in sorted(u for u in reached if u <= depth):
            value, at, width_at = np.full(n + 1, INFEASIBLE, dtype=np.int64), np.zeros(n + 1, int), np.zeros(n + 1, int)
            for width in widths:
                rest = best.get((k - 1, used - width))
                table = table_of(k, width, used) if rest is not None else None
                if rest is None or table is None:
                    continue
                own, through = table
                ends = ends_of(n, own.shape[1] - 1)
                ways = np.maximum(own, through + rest[ends])
                lengths = ways.argmin(axis=1)  # the first of the best
                found, cuts = ways[blocks, lengths], ends[blocks, lengths]
                better = found < value
                value, at = np.where(better, found, value), np.where(better, cuts, at)
                width_at = np.where(better, width, width_at)
            if (value < INFEASIBLE).any():
                best[k, used], choice[k, used] = np.minimum(value, INFEASIBLE), (at, width_at)
    return [
        _division(k, used, int(value[0]), depth - used, choice)
        for (k, used), value in sorted(best.items())
        if k and value[0] < INFEASIBLE
    ]


def _division(k: int, used: int, value: int, first: int, choice: dict[tuple[int, int], tuple[Ints, Ints]]) -> Partition:
    bounds, widths, a = [0], [], 0
    while k:
        at, width_at = choice[k, used]
        widths.append(int(width_at[a]))
        a = int(at[a])
        bounds.append(a)
        k, used = k - 1, used - widths[-1]
    return Partition(tuple(bounds), tuple(widths), value, first)
