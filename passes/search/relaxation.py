"""Relaxations that both the search and the proof use: what a part of a plan takes at least, whatever the rest is.

Nothing here knows a plan: blocks are taken on their fastest type of device, and messages are left out.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopart.ir.size import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import SearchSpace


def is_chain(space: SearchSpace) -> bool:
    """Whether the chain is the only order of the blocks: each reads what the one before it writes."""
    ops = space.chain.blocks.ops
    return all(set(a.writes) & set(b.reads) for a, b in pairwise(ops))


def gradient_edges(space: SearchSpace, rows: int | None = None) -> Ints:
    """[a, b] is 1 where block b reads, with a gradient, what the range [a, b) writes, else 0.

    The stage that begins with b then waits for the one that is [a, b), forward and backward.  rows: only values that
    have bytes at so many rows count, since nothing else is sent.
    """
    ops, n = space.chain.blocks.ops, space.chain.n
    values = space.chain.blocks.values
    sizes = [1] * len(values) if rows is None else space.chain.range_costs(Size(rows)).sizes.tolist()
    grad = {v.name for v, size in zip(values, sizes, strict=True) if v.grad and size}
    writer = {w: i for i, op in enumerate(ops) for w in op.writes}
    found = np.zeros((n + 1, n + 1), dtype=np.int64)
    for b, op in enumerate(ops):
        nearest = max((writer[r] for r in op.reads if r in writer and r in grad), default=-1)
        if nearest >= 0:
            found[: nearest + 1, b] = 1
    return found


def layout_bound(space: SearchSpace, layout: Layout, micro_rows: tuple[int, ...], most: int) -> int:
    """About the least pipeline latency, in nanoseconds, of any partition into at most `most` stages on this layout.

    Stages of t_1 .. t_S that wait for one another have U >= sum of t_q over q < s + M * t_s for each s, which is least
    where all of these are equal: U = sum of t / (1 - (1 - 1 / M)^S).  Where widths are free, all that is known is that
    the positions share the work.  O(blocks).
    """
    micros = len(micro_rows)
    whole = fastest_sums(space, -(-max(micro_rows) // layout.pipeline_replicas))[-1]
    if len(layout.widths) > 1 or not is_chain(space):
        positions = layout.depth if len(layout.widths) > 1 else min(layout.depth, most)
        return int(micros * whole) // positions
    return int(whole / (1 - (1 - 1 / micros) ** min(layout.depth, most, space.chain.n)))


def longest_range(space: SearchSpace, share: int, micros: int, most_ns: int) -> int:
    """Blocks of the longest range whose micro-batches, of `share` rows each, take at most most_ns nanoseconds.

    O(blocks log blocks).
    """
    sums = fastest_sums(space, share)
    last = np.searchsorted(sums, sums + most_ns // micros, side="right") - 1
    return max(1, int((last - np.arange(len(sums))).max()))


def fastest_sums(space: SearchSpace, rows: int) -> Ints:
    """Entry i: nanoseconds of the first i blocks at so many rows, each on its fastest type of device."""
    return np.concatenate([[0], np.cumsum(fastest_times(space, rows))]).astype(np.int64)


def fastest_times(space: SearchSpace, rows: int) -> Ints:
    """Nanoseconds of each block at so many rows, both ways, on its fastest type of device."""
    by_type = [space.chain.range_costs(Size(rows), device_type) for device_type in range(len(space.costs.device_types))]
    return np.asarray(np.min([costs.blocks[0] + costs.blocks[1] for costs in by_type], axis=0))
