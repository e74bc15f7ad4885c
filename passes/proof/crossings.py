"""What a message between two positions takes at least, wherever their devices are.

A message leaves and enters over ports, each of which carries the rows of those behind it: of one of so many devices at
least its part of the rows, over all ports that it has, one in each level.  Between kinds of devices that no group
inside the outermost level has together, all rows pass the ports of groups, in and out: of at most as many as have such
devices.  It arrives a latency after the slowest port is done, and only where a value has bytes (`traffic`).  Positions
share no device, so no row stays where it is.

Assumed: each block reads what the block before it writes; what else a stage reads is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Floats
from autopart.passes.proof.sets import Taken
from autopart.passes.search.space import SearchSpace


def sent_bytes(space: SearchSpace, rows: int) -> tuple[Floats, Floats]:
    """Return by block the bytes that the one before it sends to it at least, and of their gradients.  O(reads)."""
    ops, values = space.chain.blocks.ops, space.chain.blocks.values
    sizes = dict(zip([v.name for v in values], space.chain.range_costs(Size(rows)).sizes.tolist(), strict=True))
    learned = {v.name for v in values if v.grad}
    found = np.zeros((2, len(ops)))
    for b in range(1, len(ops)):
        sent = set(ops[b - 1].writes) & set(ops[b].reads)
        found[:, b] = sum([sizes[name] for name in sent]), sum([sizes[name] for name in sent & learned])
    return found[0], found[1]


def paces(space: SearchSpace, sets: Sequence[Taken]) -> tuple[Floats, Floats]:
    """Return the latency of a message between two of these sets of devices, and its nanoseconds per byte, at least.

    O(sets^2 * groups).
    """
    cluster, taken = space.costs.cluster, np.array(sets) > 0
    links = [level.link for level in cluster.levels]
    devices = np.array(list(map(sum, sets)), dtype=float)
    latency = np.full((len(sets), len(sets)), float(min(link.latency_ns for link in links)))
    fewest = np.minimum.outer(devices, devices)
    pace = 1e9 / (fewest * sum(link.bytes_per_s for link in links))
    if len(links) > 1:
        inner = cluster.levels[-2]
        has = np.zeros((taken.shape[1], cluster.world), dtype=np.int64)  # which groups have devices of a type
        for rank, kind in enumerate(space.costs.kinds_of(range(cluster.world))):
            has[kind, inner.group(rank)] = 1
        groups = (taken.astype(np.int64) @ has) > 0
        apart = (groups.astype(np.int64) @ groups.T) == 0
        most = np.minimum(devices, groups.sum(axis=1))
        outer = 1e9 / (np.minimum.outer(most, most) * links[-1].bytes_per_s)
        latency, pace = np.where(apart, links[-1].latency_ns, latency), np.where(apart, outer, pace)
    return latency, pace


def parted(pairs: Floats, numbers: Sequence[int]) -> Floats:
    """Return a part for each kind of position, of which those of two positions are no more than what is between them.

    pairs: (divisions, kinds, kinds), symmetric.  numbers: positions of each kind.  O(divisions * kinds^2).
    """
    between = pairs.copy()
    for kind, number in enumerate(numbers):
        if number == 1:
            between[:, kind, kind] = np.inf
    if sum(numbers) == 1:
        return np.zeros(pairs.shape[:2])
    found = np.asarray(between.min(axis=2) / 2)
    for kind in range(len(numbers)):
        left = between[:, kind] - found
        left[:, kind] = between[:, kind, kind] / 2
        found[:, kind] = left.min(axis=1)
    return found
