"""The partition: where the chain of blocks is cut into stages, and how many devices each stage gets.

For a pipeline of at most D positions, minimise over cuts 0 = c_0 < ... < c_S = n and widths r_1 .. r_S the pipeline
latency

    U = max( max over stages s of ( sum of latency_q over q < s + busy_s ), sum of latency_q over all q )

busy_s: what stage s needs for all its micro-batches, and for what follows them; latency_q: what one micro-batch needs
through stage q, forward and backward, messages into it included.  So U is the time until the slowest stage is done,
when the first micro-batch has to reach it and the last one has to come back from it; it is the time of a step when
stages never wait in between (DAPPLE's latency, PPoPP 2021, section 4.1, with every stage tried as the pivot).

Under a schedule that limits the micro-batches in flight a stage also waits: for its first micro-batch to come back
before it begins one more than it may hold, and for the last one to come back when it has begun them all.  Where tables
have turns_s, what the stage needs in between, the latency is at least, for every s,

    2 * sum of latency_q over q >= s + turns_s + sum of latency_q over q < s

which with about twice as many micro-batches as stages is the larger one, and in which a slow first stage costs more
than a slow last one, not less.  The sum over q >= s is then that of the best stages behind s, so this part is not
exact: other stages might be better together with s.

State: stages left k, devices they use d, first block a.  Recurrence, backwards from the end:

    U[k, d, a] = min over r, b of max( busy(a, b), latency(a, b) + U[k - 1, d - r, b] )

exact, because U grows with what it is made of.  k and d are known when a stage is costed, so micro-batches in flight
and the place of the stage in the cluster are too.  Tables hold ranges by first block and length, so that they are
narrow where only short ranges come into question: O(S * D * widths * n * length) in numpy, without D and widths when
every width is 1.

Assumed, and wrong where: stages wait in between (slow messages, few micro-batches in flight, uneven stages); what
comes out of this is simulated.
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
"""More than any time or memory; three times as much still fits 64 bits."""

Table = tuple[Ints, Ints] | tuple[Ints, Ints, Ints]
"""(busy_ns, latency_ns and, where stages wait for micro-batches to come back, turns_ns) over (a, b - a); INFEASIBLE in
`busy_ns` where the stage cannot be, also where b > n."""
TableOf = Callable[[int, int, int], Table | None]
"""(k: place from the end, from 1; width; devices from its first one to the end) to its table; None: never."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Stage s is blocks[bounds[s]:bounds[s + 1]] on widths[s] devices.  pipeline_latency_ns: U.  first: the position
    that the first stage begins at."""

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    pipeline_latency_ns: int
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


@dataclass(frozen=True, slots=True)
class _Best:
    """For the last k stages on d devices, by their first block: the least U, the time of a micro-batch through them,
    and of the first of these stages the block after its last and its width."""

    latency_ns: Ints
    through_ns: Ints
    end: Ints
    width: Ints


def solve_partition(
    n: int, depth: int, widths: Sequence[int], most: int, table_of: TableOf, *, spare: int = 0
) -> list[Partition]:
    """The best partition of n blocks for each number of stages (at most `most`) and each first position that has one.

    spare: so many positions at the end may idle; otherwise the stages stand on the last positions.
    """
    nothing_left = _infeasible(n)
    nothing_left.latency_ns[n] = 0
    best = {(0, idle): nothing_left for idle in range(spare + 1)}  # by (stages, devices)
    for k in range(1, min(most, depth, n) + 1):
        reached = {used + width for before, used in best if before == k - 1 for width in widths}
        for used in sorted(reached):
            if used > depth:
                continue
            found = _infeasible(n)
            for width in widths:
                rest = best.get((k - 1, used - width))
                table = table_of(k, width, used) if rest is not None else None
                if rest is not None and table is not None:
                    found = _better(found, rest, table, width)
            if (found.latency_ns < INFEASIBLE).any():
                best[k, used] = found
    return [
        _walk(best, k, used, depth)
        for (k, used), found in sorted(best.items(), key=lambda item: item[0])
        if k > 0 and found.latency_ns[0] < INFEASIBLE
    ]


def _infeasible(n: int) -> _Best:
    return _Best(np.full(n + 1, INFEASIBLE, dtype=np.int64), *(np.zeros(n + 1, int) for _ in range(3)))


def _better(known: _Best, rest: _Best, table: Table, width: int) -> _Best:
    """For each first block the better of what is known and of a stage of this width before the rest."""
    busy, latency = table[:2]
    n = len(rest.latency_ns) - 1
    ends = ends_of(n, busy.shape[1] - 1)
    by_end = np.maximum(busy, latency + rest.latency_ns[ends])
    through = latency + rest.through_ns[ends]
    if len(table) == 3:
        np.maximum(by_end, 2 * through + table[2], out=by_end)
    lengths = by_end.argmin(axis=1)  # the first of the best
    blocks = np.arange(n + 1)
    found = by_end[blocks, lengths]
    better = found < known.latency_ns
    return _Best(
        np.where(better, found, known.latency_ns),
        np.where(better, through[blocks, lengths], known.through_ns),
        np.where(better, ends[blocks, lengths], known.end),
        np.where(better, width, known.width),
    )


def _walk(best: dict[tuple[int, int], _Best], k: int, used: int, depth: int) -> Partition:
    """The partition of all blocks into k stages on the last `used` of the positions."""
    latency_ns, first = int(best[k, used].latency_ns[0]), depth - used
    bounds, widths = [0], []
    for left in range(k, 0, -1):
        choice, start = best[left, used], bounds[-1]
        widths.append(int(choice.width[start]))
        bounds.append(int(choice.end[start]))
        used -= widths[-1]
    return Partition(tuple(bounds), tuple(widths), latency_ns, first)
