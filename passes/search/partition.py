"""The partition: where the chain of blocks is cut into stages, and how many devices each stage gets.

For a pipeline of at most D positions, minimise over cuts 0 = c_0 < ... < c_S = n and widths r_1 .. r_S the pipeline
latency

    U = max( max over stages s of ( sum of latency_q over q < s + busy_s ), sum of latency_q over all q )

busy_s: time of stage s for all its micro-batches, and for what follows them; latency_q: time of one micro-batch
through stage q, forward and backward, messages into it included.  So U is the time until the slowest stage is done,
when the first micro-batch has to reach it and the last one has to come back from it; it is the time of a step when
stages never wait in between (DAPPLE's latency, PPoPP 2021, section 4.1, with every stage tried as the pivot).

Under a schedule that limits the micro-batches in flight a stage also waits: for its first micro-batch to come back
before it begins one more than it may hold, and for the last one to come back when it has begun them all.  Where tables
have turns_s, the time of the stage in between, the latency is at least, for every s,

    2 * sum of latency_q over q >= s + turns_s + sum of latency_q over q < s

which with about twice as many micro-batches as stages is the larger one, and in which a slow first stage costs more
than a slow last one, not less.  The sum over q >= s is then that of the best stages behind s, so this part is not
exact: other stages might be better together with s.

State: stages left k, devices they use d, first block a.  Recurrence, backwards from the end:

    U[k, d, a] = min over r, b of max( busy(a, b), latency(a, b) + U[k - 1, d - r, b] )

exact, because U grows with what it is made of.  k and d are known when a stage is costed, so micro-batches in flight
and the place of the stage in the cluster are too.  Unlike devices are counted by kind, so d and r are vectors, and
which kind comes where in the pipeline is chosen with the cuts (`solve_pools`).  Tables hold ranges by first block and
length, so that they are narrow where only short ranges are possible: O(S * D * widths * n * length) in numpy, without D
and widths when every width is 1.

Assumed, and wrong where: stages wait in between (slow messages, few micro-batches in flight, uneven stages).  The
result is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, gt, sub
from typing import NamedTuple, TypeVar

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
"""From (k: place from the end, from 1; width; devices from its first to the last) to a table; None: not allowed."""

Taken = tuple[int, ...]
"""Numbers of devices of each kind, or one number of positions."""


class Cut(NamedTuple):
    """A way to cut the chain: stage s is blocks[bounds[s]:bounds[s + 1]] on taken[s] devices, `used` in all.

    latency_ns: U.
    """

    bounds: tuple[int, ...]
    taken: tuple[Taken, ...]
    latency_ns: int
    used: Taken


class Partition(NamedTuple):
    """A way to cut the chain: stage s is blocks[bounds[s]:bounds[s + 1]] on widths[s] positions.

    latency_ns: U.  first: the first position of the first stage.
    """

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    latency_ns: int = 0
    first: int = 0


def by_length(matrix: npt.NDArray[_T], length: int) -> npt.NDArray[_T]:
    """Return a matrix over (a, b) as one over (a, b - a), for ranges of at most `length`; (a, n) past the end."""
    n = len(matrix) - 1
    return matrix[np.arange(n + 1)[:, None], ends_of(n, length)]


@lru_cache(maxsize=8)
def ends_of(n: int, length: int) -> Ints:
    """Return the matrix of a + i, but at most n, over (a, i), which nobody writes to."""
    return np.asarray(np.minimum(np.arange(n + 1)[:, None] + np.arange(length + 1)[None, :], n))


@dataclass(frozen=True, slots=True)
class _Best:
    """The best last k stages on d devices, by their first block.

    latency_ns: the least U.  through_ns: the time of a micro-batch through them.  end, width: of the first of these
    stages, the block after its last one and its width.
    """

    latency_ns: Ints
    through_ns: Ints
    end: Ints
    width: list[Taken]


def solve_partition(
    n: int, depth: int, widths: Sequence[int], most: int, table_of: TableOf, *, spare: int = 0
) -> list[Partition]:
    """Return the best partition of n blocks for each number of stages (at most `most`) and each first position.

    spare: number of positions at the end that may idle; otherwise the stages stand on the last positions.
    """
    found = solve_pools(
        n,
        (depth,),
        [(width,) for width in widths],
        most,
        lambda k, width, used: table_of(k, width[0], used[0]),
        idle=[(idle,) for idle in range(spare + 1)],
    )
    return [Partition(c.bounds, tuple([own for (own,) in c.taken]), c.latency_ns, depth - c.used[0]) for c in found]


def solve_pools(
    n: int,
    counts: Taken,
    widths: Sequence[Taken],
    most: int,
    table_of: Callable[[int, Taken, Taken], Table | None],
    *,
    idle: Sequence[Taken],
) -> list[Cut]:
    """Return the best way to cut n blocks for each number of stages (at most `most`) and all devices that these use.

    counts: devices of each kind.  widths: what a stage may take.  idle: what may idle behind the last stage.
    """
    nothing_left = _infeasible(n)
    nothing_left.latency_ns[n] = 0
    best = {(0, used): nothing_left for used in idle}  # by (stages, devices)
    for k in range(1, min(most, sum(counts), n) + 1):
        before = [used for stages, used in best if stages == k - 1]
        reached = {tuple(map(add, used, width)) for used in before for width in widths}
        for used in sorted(reached):
            if any(map(gt, used, counts)):
                continue
            found = _infeasible(n)
            for width in widths:
                rest = best.get((k - 1, tuple(map(sub, used, width))))
                table = table_of(k, width, used) if rest is not None else None
                if rest is not None and table is not None:
                    found = _better(found, rest, table, width)
            if (found.latency_ns < INFEASIBLE).any():
                best[k, used] = found
    return [
        _walk(best, k, used)
        for (k, used), found in sorted(best.items(), key=lambda item: item[0])
        if k > 0 and found.latency_ns[0] < INFEASIBLE
    ]


def _infeasible(n: int) -> _Best:
    latency, through, end = (np.full(n + 1, value, dtype=np.int64) for value in (INFEASIBLE, 0, 0))
    return _Best(latency, through, end, [()] * (n + 1))


def _better(known: _Best, rest: _Best, table: Table, width: Taken) -> _Best:
    """Return by first block the better of `known` and of a stage of this width before the rest."""
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
        [width if own else other for own, other in zip(better.tolist(), known.width, strict=True)],
    )


def _walk(best: dict[tuple[int, Taken], _Best], k: int, used: Taken) -> Cut:
    """Return the way to cut all blocks into k stages on these devices."""
    latency_ns, left = int(best[k, used].latency_ns[0]), used
    bounds, taken = [0], list[Taken]()
    for stages in range(k, 0, -1):
        choice, start = best[stages, left], bounds[-1]
        taken.append(choice.width[start])
        bounds.append(int(choice.end[start]))
        left = tuple(map(sub, left, taken[-1]))
    return Cut(tuple(bounds), tuple(taken), latency_ns, used)
