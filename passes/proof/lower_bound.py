"""Lower bounds: what no plan can be faster than.

For any plan that cuts between the blocks of a line, with any number of stages, replicas and any placement:

    work      sum over stages of r_s * step >= M * sum of r_s * t_s >= M * t(all blocks, whole micro-batch)
              since a device cannot be busy for longer than the step and a share of the rows takes at least its share
              of the time; so step >= M * t / devices, of which a request that fixes stages or replicas leaves some idle
    path      step >= the longest way of one micro-batch through the graph and back, each block on as many replicas as
              there can be
    line      U of `partition` with everything that can only be guessed left out: no messages but their latency, the
              best place for every sum of gradients, memory for one micro-batch.  Valid where the line is the only
              order of the blocks, that is where each block reads from the one before it.

The bound of a request is the least over the ways to cut the batch that it allows.  The certificate of `exact` covers
all orders, for one number of stages.

Assumed: costs are those of the line (`line`), and the step is the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from autopart.ir.cluster import Cluster
from autopart.ir.plan import ASYNC
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.partition import INFEASIBLE
from autopart.passes.search.relaxation import fastest_times, gradient_edges, is_chain
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import optimizer_ns

MOST_WORK = 10_000_000
"""Cells of the line's bound (devices squared times blocks squared, halved); larger problems get that of the work."""


def lower_bound(space: SearchSpace) -> int:
    """Nanoseconds that no plan of the space is simulated faster than.

    Ways to cut the batch are looked at by their cheap bounds, until none can lower the least one any more.
    O(ways * devices^2 * blocks^2), or less.
    """
    cheap = sorted((_cheap_bound(space, rows), rows) for rows in space.request.micro_rows)
    least = _bound(space, *cheap[0])
    for work, rows in cheap[1:]:
        if work >= least:
            break
        least = min(least, _bound(space, work, rows))
    return least


def _cheap_bound(space: SearchSpace, micro_rows: tuple[int, ...]) -> int:
    return max(work_bound(space, micro_rows), _path_bound(space, max(micro_rows)))


def _bound(space: SearchSpace, work: int, micro_rows: tuple[int, ...]) -> int:
    devices = most_devices(space, max(micro_rows)) if space.request.may_replicate else 1
    if space.request.schedule == ASYNC or not is_chain(space) or devices**2 * space.chain.n**2 // 2 > MOST_WORK:
        return work
    return max(work, _line_bound(space, micro_rows))


def work_bound(space: SearchSpace, micro_rows: tuple[int, ...]) -> int:
    """Nanoseconds that all devices together need at least, each on the fastest kind."""
    totals = [
        int((sheet.blocks[0] + sheet.blocks[1]).sum())
        for kind in range(len(space.costs.kinds))
        for sheet in [space.chain.sheet(max(micro_rows), kind)]
    ]
    return len(micro_rows) * min(totals) // most_devices(space, max(micro_rows))


def most_devices(space: SearchSpace, rows: int) -> int:
    """Devices that can work in any plan of the space, with micro-batches of so many rows."""
    request, world = space.request, space.costs.cluster.world
    if isinstance(request.replicas, tuple):
        return min(world, sum(request.replicas))
    stages = min(space.chain.n, request.stages or world)
    return min(world, stages * max(_replicas(space, rows)))


def _replicas(space: SearchSpace, rows: int) -> tuple[int, ...]:
    """Numbers of replicas that a stage can have, ascending."""
    request = space.request
    if not request.may_replicate:
        return (1,)
    if request.replicas is None:
        return tuple(range(1, min(space.costs.cluster.world, rows) + 1))
    return (request.replicas,) if isinstance(request.replicas, int) else tuple(sorted(set(request.replicas)))


def _path_bound(space: SearchSpace, rows: int) -> int:
    """Nanoseconds of the longest path of blocks, forward and backward, on the fastest kind.  O(reads)."""
    replicas = max(_replicas(space, rows))
    times = fastest_times(space, -(-rows // replicas)).tolist()
    ready: dict[str, int] = {}
    longest = 0
    for op, taken in zip(space.chain.blocks.ops, times, strict=True):
        end = max((ready.get(read, 0) for read in op.reads), default=0) + taken
        longest = max(longest, end)
        ready.update(dict.fromkeys(op.writes, end))
    return longest


def _line_bound(space: SearchSpace, micro_rows: tuple[int, ...]) -> int:
    """The larger of two relaxations: until the last backward has come back, and until the last sum is done."""
    n, rows, micros = space.chain.n, max(micro_rows), len(micro_rows)
    latency = min(level.link.latency_ns for level in space.costs.cluster.levels)
    waits, sent = gradient_edges(space), gradient_edges(space, rows)
    both, last = {}, {}
    for replicas in _replicas(space, rows):
        forward, backward, after = _optimistic(space, replicas, -(-rows // replicas))
        legal = space.legal
        time = forward + backward
        both[replicas] = _table(micros * time, np.where(waits, time, 0) + np.where(sent, 2 * latency, 0), legal)
        if space.costs.overlap:  # the last backward hides the sum, as far as it goes
            after = np.maximum(after - backward, 0)
        through = np.where(waits, forward, 0) + np.where(sent, latency, 0)
        last[replicas] = _table(micros * time + after, through, legal)
    devices = most_devices(space, rows)
    return max(_least(n, devices, both), _least(n, devices, last))


def _table(own: Ints, through: Ints, legal: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[Ints, Ints]:
    return np.where(legal, own, INFEASIBLE), through


def _optimistic(space: SearchSpace, replicas: int, share: int) -> tuple[Ints, Ints, Ints]:
    """(forward, backward, what follows) of every range on the fastest kind at the best place."""
    setting = space.costs
    kinds = range(len(setting.kinds))
    forward = np.min([space.chain.sheet(share, kind).ranges("fwd_ns") for kind in kinds], axis=0)
    backward = np.min([space.chain.sheet(share, kind).ranges("bwd_ns") for kind in kinds], axis=0)
    passes = 2 * (replicas - 1) / replicas * 1e9 / _best_rate(setting.cluster, replicas)
    optimizer = min(optimizer_ns(1 << 30, setting.state_factor, kind) for kind in setting.kinds) / (1 << 30)
    after = np.floor(space.chain.trained * (passes + optimizer)).astype(np.int64)
    return forward, backward, np.maximum(after - 1, 0)


def _best_rate(cluster: Cluster, ranks: int) -> int:
    """Bytes/s of the slowest port that a ring over so many ranks must pass, however they are chosen: one of each level
    whose inner groups cannot hold them all."""
    levels = cluster.levels
    needed = [outer.link.bytes_per_s for inner, outer in pairwise(levels) if ranks > inner.size]
    return min(needed, default=max(level.link.bytes_per_s for level in levels))


def _least(n: int, devices: int, tables: Mapping[int, tuple[Ints, Ints]]) -> int:
    """The recurrence of `partition` without the number of stages: only devices used so far.  tables: by replicas."""
    best = [np.full(n + 1, INFEASIBLE, dtype=np.int64) for _ in range(devices + 1)]
    for row in best:
        row[n] = 0
    for used in range(1, devices + 1):
        value = best[used - 1].copy()  # a device may idle
        for replicas, (own, through) in tables.items():
            if replicas > used:
                continue
            ways = np.maximum(own, through + best[used - replicas][None, :])
            value = np.minimum(value, ways.min(axis=1))
        value[n] = 0
        best[used] = value
    return int(best[devices][0])
