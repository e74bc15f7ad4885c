"""A lower bound that prices what plans trade against each other: work, the path of a micro-batch, sums of gradients and
memory.

Take any plan with M micro-batches, under any order.  Every block b stands on some devices c.  With weights w of types
of devices, W those of all devices that work, and any 0 <= path, sums <= 1 and prices of memory >= 0,

    step >= path * (sum over b of the time of one micro-batch through b on c)
          + (1 - path) / W * (sum over b of w-weighted times of the devices of c - price * memory of all devices)

    times of c    M forwards and M - sums * n backwards of b, in shares, on the type with the least weighted time;
                  w * sums * (the ring over c with the gradients of b), for each of c; w * the optimizer step;
                  price * (weights, gradients and state of b, for each of c, and n times what b saves)

A device is busy for all its computes.  The sum of a stage's gradients begins in the backward of its last micro-batch,
when all forwards of the stage are done, and while it runs no more than n backwards of its device are left: with one
stage a rank n = 1; with several n <= M, those of which activations are still held, and the stages of a rank never stand
on all devices.  A block that is recomputed saves nothing and has a forward in each backward.  All of this is linear, so
each block has its best devices for itself, and the bound is the sum of these: no plan is looked at.

Any prices give a bound; the best of a grid is taken.  Assumed: a share of the rows takes at least its share of
the time; what several blocks share needs no memory and no sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Floats
from autopart.passes.ops.cost_model import FIELDS
from autopart.passes.ops.weight_parts import summed_bytes
from autopart.passes.search.space import SearchSpace, block_costs, is_chain
from autopart.passes.simulation.charges import optimizer_ns

MOST_CELLS = 100_000
"""Blocks times sets of devices up to which prices are tried."""
PATHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
SUMS = (0.0, 0.5, 0.8, 0.95, 1.0)
MEMORY = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Prices that are tried; of memory in backwards of all blocks per byte that they save."""


@dataclass(frozen=True)
class Prices:
    """What is tried: parts of the path and of the sums, and the price of memory."""

    path: float = 0.0
    sums: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class Priced:
    """A space, a way to cut the batch, and the weights of types of devices.

    most: sum of the weights of the devices that work.  widest: devices of a stage at most.  several: whether ranks have
    several stages.  orders: whether backwards may be split.
    """

    space: SearchSpace
    micro_rows: tuple[int, ...]
    weights: Floats
    most: float
    widest: int
    several: bool = False
    orders: bool = False

    @cached_property
    def _times(self) -> tuple[Floats, Floats, Floats]:
        """Forward, backward, and what of it makes gradients of weights, by type and block."""
        costs = block_costs(self.space, max(self.micro_rows)).astype(np.float64)
        return costs[:, 0], costs[:, 1], costs[:, FIELDS.index("weight_ns")]

    @cached_property
    def _saved(self) -> Floats:
        row = self.space.chain.range_costs(Size(max(self.micro_rows))).blocks[FIELDS.index("saved_bytes")]
        return np.asarray(np.where(self.space.asked_blocks >= 0, 0, row), dtype=np.float64)

    @cached_property
    def _own(self) -> tuple[Floats, Floats, Floats]:
        """Bytes of parameters, of trainable ones and of their summed gradients that a block alone uses."""
        blocks = self.space.chain.blocks
        params = blocks.param_map()
        users = Counter(name for op in blocks.ops for name in set(op.params))
        found = []
        for op in blocks.ops:
            own = [params[name] for name in set(op.params) if users[name] == 1]
            trained = [p for p in own if p.trainable]
            found.append(
                (sum(p.size_bytes for p in own), sum(p.size_bytes for p in trained), sum(map(summed_bytes, trained)))
            )
        weights, trainable, summed = np.array(found, float).reshape(-1, 3).T
        return weights, trainable, summed

    @cached_property
    def taken(self) -> Floats | None:
        """The sets of devices that a block may stand on, as numbers of each type; None if they are too many."""
        request, cluster, types = self.space.request, self.space.costs.cluster, self.space.costs.device_types
        counts = Counter(cluster.devices)
        if prod(counts[kind] + 1 for kind in types) * self.space.chain.n > MOST_CELLS:
            return None
        most = min(self.widest, cluster.world - self.several)
        asked = request.replicas if isinstance(request.replicas, tuple) else (request.replicas,)
        every = product(*(range(counts[kind] + 1) for kind in types))
        found = [c for c in every if 0 < sum(c) <= most and (asked == (None,) or sum(c) in asked)]
        return np.array(found, float) if found else None

    def ns(self, prices: Prices) -> float:
        """Return the bound at these prices, in nanoseconds."""
        taken, (fwd, bwd, later), costs = self.taken, self._times, self.space.costs
        assert taken is not None
        micros, saved, w = len(self.micro_rows), self._saved, self.weights[:, None]
        own, trained, summed = self._own
        replicas = taken.sum(axis=1)[:, None]
        price = prices.memory * self.weights * float(bwd.sum(axis=1).min()) / max(1.0, float(saved.sum()))
        limits = np.array([device.memory_bytes - device.reserve_bytes for device in costs.device_types], float)
        room = float((price * limits * [costs.cluster.devices.count(d) for d in costs.device_types]).sum())

        def least(n: int, *, again: bool) -> Floats:
            both = bwd + fwd if again else bwd
            kept = 0.0 if again else price[:, None] * n * saved
            each = w * (micros * fwd + (micros - prices.sums * n) * both) + kept
            return np.asarray(np.where(taken[:, :, None] > 0, each[None], np.inf).min(axis=1))

        ways = [
            least(n, again=again)
            for n in ((0, micros) if self.several else (1,))
            for again in ((False, True) if self.space.request.may_recompute else (False,))
        ]
        weight, priced = (taken @ self.weights)[:, None], (taken @ price)[:, None]
        rates = [optimizer_ns(1 << 30, costs.state_factor, device) / (1 << 30) for device in costs.device_types]
        update = (taken @ (self.weights * np.array(rates)))[:, None] * trained
        state = costs.state_factor * trained
        turn = self._turns()[:, None]
        alone = weight * prices.sums * 2 * turn * summed + update + priced * (own + summed + state)
        shared = weight * turn * (prices.sums * summed + trained) + (update + priced * state) / replicas
        shared = shared + priced * (own + summed)
        zero = self.space.request.zero
        ends = (
            alone
            if zero == 0 or not self.space.request.may_shard
            else shared
            if zero == 1
            else np.minimum(alone, shared)
        )
        working = (np.min(ways, axis=0) + ends) * ((1 - prices.path) / self.most)
        path = 0.0
        if prices.path:
            through = np.maximum(fwd + bwd - (later if self.orders else 0), 1e-9)
            path = prices.path / (taken[:, :, None] / through[None]).sum(axis=1)
        return float((working + path).min(axis=0).sum()) - room * (1 - prices.path) / self.most

    def _turns(self) -> Floats:
        """Return the nanoseconds per byte of a turn of the ring over each set of devices, at the best place."""
        assert self.taken is not None
        levels, found = self.space.costs.cluster.levels, []
        for replicas in self.taken.sum(axis=1):
            needed = [outer.link.bytes_per_s for inner, outer in pairwise(levels) if replicas > inner.size]
            rate = min(needed, default=max(level.link.bytes_per_s for level in levels))
            found.append((replicas - 1) / replicas * 1e9 / rate)
        return np.array(found)


def priced_bound(case: Priced) -> int:
    """Return the bound at the best prices that are found, in nanoseconds.  O(prices * blocks * sets of devices)."""
    request = case.space.request
    if case.taken is None or request.policy != "split" or not request.synchronous or not case.space.costs.overlap:
        return 0
    paths = PATHS if is_chain(case.space) else PATHS[:1]
    least = case.ns(Prices())
    for memory in MEMORY:
        found = [Prices(path, sums, memory) for path in paths for sums in SUMS]
        values = [case.ns(prices) for prices in found]
        if memory and max(values) <= least:
            break  # memory is not short: more of its price does not help
        least = max(least, *values)
    return max(0, int(least * (1 - 1e-9)) - 2)
