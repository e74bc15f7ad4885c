"""A lower bound that prices what plans trade against each other: work, the path of a micro-batch, sums of gradients and
memory.

Take any plan with M micro-batches, under any order.  Every block b stands on some devices c.  With weights w of types
of devices, W those of all devices that work, and any 0 <= path, sums <= 1 and prices of memory >= 0,

    step >= path * (sum over b of the time of one micro-batch through b on c)
          + (1 - path) / W * (sum over b of w-weighted times of the devices of c - price * memory of all devices)

    times of c    M forwards and M - sums backwards of b, of the rows that one type in c has at least (`sets`), for each
                  of c, since those that have less wait;
                  w * sums * (the ring over c with the gradients of b), for each of c; w * the optimizer step;
                  price * (weights, gradients and state of b, for each of c, and what b saves of one micro-batch)

A device is busy for all its computes.  Sums of gradients follow the last compute of a rank, one after the other, and
run beside that compute (`play`): no more than one backward of one of its stages hides them.  When the last forward of a
stage ends, its activations are held.  A block that is recomputed saves nothing and has a forward in each backward, but
for its end, which need not run again where it is the last of its group (`redone_ns`).  All of this is linear, so each
block has its best devices for itself, and the bound is the sum of these: no plan is looked at.  What devices can do
together, divided into positions, is left to `positions`.

Any prices give a bound; the best of a grid is taken.  Assumed: as in `sets`; what several blocks share needs no
memory and no sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Floats, Ints
from autopart.passes.ops.cost_model import FIELDS
from autopart.passes.ops.weight_parts import summed_bytes
from autopart.passes.proof.sets import Taken, counts_of, part_ns, rates_of, rows_needed, sets_of
from autopart.passes.search.space import SearchSpace, block_costs
from autopart.passes.simulation.charges import optimizer_ns

ENDLESS = 1e20
"""Nanoseconds of a part that no set has."""
MOST_CELLS = 100_000
"""Blocks times sets of devices up to which prices are tried."""
PATHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
SUMS = (0.0, 0.5, 0.8, 0.95, 1.0)
MEMORY = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Prices that are tried: parts of the step that count for the path and for the sums, and of memory in backwards of all
blocks per byte that they save."""


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
    def _times(self) -> tuple[Ints, Floats]:
        """By set, places of the parts of a micro-batch for one of which at least its devices are busy; and of each part
        forward, backward, what of it makes gradients of weights, and the end of the forward that need not run again, by
        block: endless for the last part."""
        rows, fields = max(self.micro_rows), [0, 1, FIELDS.index("weight_ns"), FIELDS.index("tail_ns")]
        rates = rates_of(self.space, rows)
        needed = [rows_needed(taken, rates, rows) for taken in self.sets or ()]
        places = {part: place for place, part in enumerate(dict.fromkeys(part for parts in needed for part in parts))}
        times = [part_ns(self.space, kind, own, rows)[fields] for kind, own in places]
        most = max(map(len, needed))
        found = np.array([[*(places[part] for part in parts), *[-1] * (most - len(parts))] for parts in needed])
        return found, np.concatenate([np.array(times), np.full((1, len(fields), self.space.chain.n), ENDLESS)])

    @cached_property
    def _backward_ns(self) -> float:
        """Of all blocks, for a whole micro-batch on the fastest type."""
        return float(block_costs(self.space, max(self.micro_rows))[:, 1].sum(axis=1).min())

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
    def sets(self) -> list[Taken] | None:
        """The sets of devices that a block may stand on; None if they are too many."""
        most = min(self.widest, self.space.costs.cluster.world - self.several)
        return sets_of(self.space, most, MOST_CELLS // self.space.chain.n)

    @cached_property
    def parts_ns(self) -> tuple[Ints, Floats, Floats, Floats]:
        """By set, places of the parts for one of which at least its devices are busy, -1 for no other; and of each part
        forward, backward, and the part of the latter that does not wait, by block: endless for the last part."""
        places, times = self._times
        inputs = times[:, 1] - times[:, 2]
        inputs[-1] = ENDLESS
        return places, times[:, 0], times[:, 1], inputs

    @cached_property
    def ends_ns(self) -> tuple[Floats, Floats]:
        """Of each set and block the optimizer step, with what it gathers, and the sums of gradients."""
        costs, request = self.space.costs, self.space.request
        _, trained, summed = self._own
        every = [optimizer_ns(1 << 30, costs.state_factor, device) / (1 << 30) for device in costs.device_types]
        taken, turn = np.array(self.sets, float), self._turns()[:, None]
        rates = np.where(taken > 0, every, 0.0).max(axis=1)[:, None]
        alone = rates * trained, 2 * turn * summed
        shared = (rates / taken.sum(axis=1)[:, None] + turn) * trained, turn * summed
        if request.zero == 0 or not request.may_shard:
            return alone
        if request.zero == 1:
            return shared
        return np.minimum(alone[0], shared[0]), np.minimum(alone[1], shared[1])

    def ns(self, sums: float, memory: float, paths: Sequence[float]) -> list[float]:
        """Return the bounds at these prices of sums and of memory, in nanoseconds: one for each price of the path."""
        taken, (places, times), costs = np.array(self.sets, float), self._times, self.space.costs
        fwd, bwd, later, tail = (times[:, field] for field in range(4))
        micros, saved = len(self.micro_rows), self._saved
        own, trained, summed = self._own
        replicas, weight = taken.sum(axis=1)[:, None], (taken @ self.weights)[:, None]
        price = memory * self.weights * self._backward_ns / max(1.0, float(saved.sum()))
        limits = np.array([device.memory_bytes - device.reserve_bytes for device in costs.device_types], float)
        room = float((price * limits * counts_of(self.space)).sum())

        def least(*, again: bool) -> Floats:
            both = bwd + fwd - tail if again else bwd
            busy = (micros * fwd + (micros - sums) * both)[places].min(axis=1)
            cheapest = np.where(taken > 0, price, np.inf).min(axis=1)[:, None]
            return np.asarray(weight * busy + (0.0 if again else cheapest * saved))

        ways = [least(again=again) for again in ((False, True) if self.space.request.may_recompute else (False,))]
        priced = (taken @ price)[:, None]
        rates = [optimizer_ns(1 << 30, costs.state_factor, device) / (1 << 30) for device in costs.device_types]
        update = (taken @ (self.weights * np.array(rates)))[:, None] * trained
        state = costs.state_factor * trained
        turn = self._turns()[:, None]
        alone = weight * sums * 2 * turn * summed + update + priced * (own + summed + state)
        shared = weight * turn * (sums * summed + trained) + (update + priced * state) / replicas
        shared = shared + priced * (own + summed)
        zero = self.space.request.zero
        ends = (
            alone
            if zero == 0 or not self.space.request.may_shard
            else shared
            if zero == 1
            else np.minimum(alone, shared)
        )
        working = np.min(ways, axis=0) + ends
        through = (fwd + bwd - (later if self.orders else 0))[places].min(axis=1)
        left = [(1 - path) / self.most for path in paths]
        return [
            float((working * part + path * through).min(axis=0).sum()) - room * part
            for path, part in zip(paths, left, strict=True)
        ]

    def _turns(self) -> Floats:
        """Return the nanoseconds per byte of a turn of the ring over each set of devices, at the best place."""
        levels, found = self.space.costs.cluster.levels, []
        for replicas in map(sum, self.sets or ()):
            needed = [outer.link.bytes_per_s for inner, outer in pairwise(levels) if replicas > inner.size]
            rate = min(needed, default=max(level.link.bytes_per_s for level in levels))
            found.append((replicas - 1) / replicas * 1e9 / rate)
        return np.array(found)


def priced_bound(case: Priced) -> int:
    """Return the bound at the best prices that are found, in nanoseconds; 0 for none.

    O(prices * blocks * sets of devices).
    """
    request = case.space.request
    if not case.sets or request.policy != "split" or not request.synchronous or not case.space.costs.overlap:
        return 0
    paths = PATHS if case.space.is_chain else PATHS[:1]
    (least,) = case.ns(0.0, 0.0, (0.0,))
    for memory in MEMORY:
        values = [value for sums in SUMS for value in case.ns(sums, memory, paths)]
        if memory and max(values) <= least:
            break  # memory is not short: more of its price does not help
        least = max(least, *values)
    return max(0, int(least * (1 - 1e-9)) - 2)
