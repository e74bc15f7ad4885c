"""Tables for the partition: the cost of every stage [a, b) at a place in the pipeline, over (a, b - a).

The same model as `estimate`, in closed form over ranges: times of a replica's share of a micro-batch, messages into the
stage over the port that it would use, the sum of gradients and the optimizer behind the last backward, memory with the
micro-batches in flight.  Where memory is short and recomputation allowed, the stage pays for the share of its blocks
that has to be recomputed: excess / what recomputing all of them frees, alone or in groups, of its forward.

Unlike devices share the rows by speed, to fractions of rows.

Wrong where: recomputed blocks free unequal amounts (the evaluation chooses them one by one); everything that crosses
the end of a stage counts as sent by it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.graph import Size
from autopart.ir.program import MESSAGES_AHEAD
from autopart.passes.graph.chain import RangeCosts, largest
from autopart.passes.graph.cuts import Ints
from autopart.passes.ops.cost_model import FIELDS
from autopart.passes.program.named import DELAYED
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, in_flight, streams
from autopart.passes.search.layout import Layout, Pools, by_speed
from autopart.passes.search.partition import INFEASIBLE, Table, by_length, ends_of
from autopart.passes.search.space import Bools, SearchSpace
from autopart.passes.simulation.charges import copying_ns, optimizer_ns, summing_ns

GROUPS = (2, 4, 8)
"""Numbers of groups into which a range may be recomputed, besides one."""

_LAST = "last table"
"""The key of the memo under which the table is kept that was made last."""

Floats = npt.NDArray[np.float64]
_T = TypeVar("_T")
_Args = ParamSpec("_Args")
_Tables = TypeVar("_Tables", bound="StageCostTables")


def _remembered(compute: Callable[Concatenate[_Tables, _Args], _T]) -> Callable[Concatenate[_Tables, _Args], _T]:
    """Cache the results of a method in the tables' memo, by its arguments and the longest range."""

    def known(self: _Tables, /, *args: _Args.args, **options: _Args.kwargs) -> _T:
        key = compute.__name__, self.longest, args
        if key not in self.memo:
            self.memo[key] = compute(self, *args, **options)
        found: _T = self.memo[key]
        return found

    return known


class _Place(NamedTuple):
    """The devices of a stage and their links.

    device_types: one if all are alike or the slowest counts, else of each device, since they share the rows.
    memory_bytes: the least.  arriving: pace of messages into the stage.  ring: pace of a turn of the ring of its
    replicas.  summing: nanoseconds of compute per summed byte.
    """

    device_types: tuple[int, ...]
    memory_bytes: int
    arriving: tuple[int, float]
    ring: tuple[int, float]
    summing: float


class _Memory(NamedTuple):
    """Bytes of every range.

    static: independent of the micro-batches in flight.  held: for each of them.  gained: freed for each of them by
    recomputing all blocks one by one.  saved: by each.  least: the fewest that cross a boundary inside.  redone: saved
    by the largest group that is recomputed in any case.
    """

    static: Ints
    held: Ints
    gained: Ints
    saved: Ints
    least: Ints
    redone: Ints


@dataclass(frozen=True)
class StageCostTables:
    """The tables for one way to cut the batch, one schedule and one layout, by place in the pipeline (`TableOf`).

    longest: blocks of the longest range that is possible.  stages: the number of stages, where it is fixed.
    ignore_memory: whether memory has no limit.  waits: 1 at [a, b] where the stage that begins at b waits for [a, b);
    None: everywhere.  memo: results that tables with equal spaces, micro-batches and schedules share.
    """

    space: SearchSpace
    layout: Layout | Pools
    micro_rows: tuple[int, ...]
    schedule: str
    longest: int
    stages: int | None = None
    ignore_memory: bool = False
    waits: Ints | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> int:
        return max(self.micro_rows)

    @cached_property
    def _waits(self) -> Ints | None:
        return None if self.waits is None else by_length(self.waits, self.longest)

    @cached_property
    def _learns(self) -> Bools:
        """Whether a stage of a range has a backward."""
        return np.asarray(by_length(self.space.may_learn, self.longest))

    def __call__(self, k: int, width: Any, used: Any) -> Table | None:
        """Return the table of the k-th stage from the end, on `width` positions, `used` of them to the end; of `Pools`
        both are `Taken`."""
        replicas, request = self.layout.replicas(width), self.space.request
        stage = None if self.stages is None else self.stages - k
        if replicas > request.most_replicas(self.micro_rows):
            return None
        if self.stages is not None and stage is not None:
            fixed = request.replicas_of(self.stages)
            if fixed is not None and (len(fixed) != self.stages or fixed[stage] != replicas):
                return None
        pinned = stage if request.pins else None
        place = self._place(self.layout, used, width)
        asked = self._live(k), pinned, replicas, place
        if len(self.layout.widths) > 1:
            return self._known_table(*asked, self._waits is None)
        # The last one is enough: from as many stages on as there are micro-batches, stages in a row have equal tables.
        key = self.longest, asked, self._waits is None
        if self.memo.get(_LAST, (None,))[0] != key:
            self.memo[_LAST] = key, self._table(*asked)
        table: Table = self.memo[_LAST][1]
        return table

    @_remembered
    def _known_table(self, live: int, stage: int | None, replicas: int, place: _Place, everywhere: bool) -> Table:
        """Return `_table`.  everywhere: whether every stage waits for the one before it."""
        return self._table(live, stage, replicas, place)

    @_remembered
    def _place(self, layout: Layout | Pools, used: Any, width: Any) -> _Place:
        costs, (ranks, before) = self.space.costs, layout.stage(used, width)
        cluster = costs.cluster
        device_types = tuple(sorted(costs.kinds_of(ranks)))
        if len(set(device_types)) == 1 or len(ranks) > self._rows:
            device_types = tuple(sorted(set(device_types)))  # the slowest counts
        memory = cluster.least_memory_bytes(ranks)
        arriving, ring = costs.loads.paces(before, ranks)
        summing = summing_ns(1 << 30, ranks, cluster) / (1 << 30)
        return _Place(device_types, INFEASIBLE if self.ignore_memory else memory, arriving, ring, summing)

    def _live(self, k: int) -> int:
        """Return the micro-batches in flight on the k-th stage from the end.

        Where the number of stages is open, it counts as the first of k stages: exact for the built-in schedules, and
        for others the evaluation decides.
        """
        stages = k if self.stages is None or k > self.stages else self.stages
        return in_flight(find(self.schedule), stages - k, Shape(stages, len(self.micro_rows)))

    def _table(self, live: int, stage: int | None, replicas: int, place: _Place) -> Table:
        """Return (busy_ns, latency_ns and perhaps turns_ns) of every range.

        live: micro-batches in flight.  stage: its number, where pins make a difference.
        """
        micros, synchronous = len(self.micro_rows), find(self.schedule).synchronous
        alternating = replicas if self.space.request.policy == "turn" else 1
        share = -(-self._rows * alternating // replicas)
        work = self._work(live, replicas // alternating, share, place)
        hides = share if self.space.costs.overlap else 0
        following = self._following(hides, replicas, place.ring, place.summing, place.device_types)
        if stage is not None:
            work = np.where(self._legal(self.space.legal_at(stage)), work, INFEASIBLE)
        step = self._whole(work, following, alternating)
        busy = np.minimum(np.where(work < INFEASIBLE, step, INFEASIBLE), INFEASIBLE)
        latency = np.minimum(work + self._arriving(*place.arriving), INFEASIBLE)
        if self._waits is not None:  # then the wait for the first micro-batch to come back is unknown, too
            return busy, np.where(self._waits, latency, 0)
        turns = micros - live - 1  # between the first micro-batch that comes back and the last
        if turns < 0 or alternating > 1 or not synchronous:
            return busy, latency
        return busy, latency, np.minimum(turns * work + following, INFEASIBLE)

    def _whole(self, work: Ints, following: Ints, alternating: int) -> Ints:
        """Return the nanoseconds that all micro-batches keep a stage busy, updates of the weights included."""
        micros, schedule = len(self.micro_rows), find(self.schedule)
        if streams(schedule):  # batch after batch, also if replicas take whole batches in turn
            return -(-micros * work // alternating) + -(-micros * following // lcm(micros, alternating))
        steps = 1 if schedule.synchronous else micros  # a user's updates the weights after every micro-batch
        whole: Ints = -(-micros // alternating) * work + steps * following
        return whole

    # ---- time ------------------------------------------------------------------------------------------------------

    def _work(self, live: int, replicas: int, share: int, place: _Place) -> Ints:
        """Return the nanoseconds of a micro-batch with recomputation; INFEASIBLE where not allowed or too large."""
        forward, _, time = self._times(share, place.device_types)
        costs = self.space.costs
        if not DEVICE_KINDS[costs.cluster.kind].beside:
            time = time + self._copying(replicas, place.device_types)
        recomputed = self._recomputed(live, replicas, share, place)
        if recomputed is None:
            return time
        extra = np.ceil(np.minimum(recomputed, 1.0) * forward).astype(np.int64)
        return np.where(recomputed <= 1.0, time + extra, INFEASIBLE)

    @_remembered
    def _times(self, share: int, device_types: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
        """Return (forward that may be recomputed, backward, both ways or INFEASIBLE where not allowed) of every range.

        Groups that are recomputed in any case, and one block's end that does not run again, are not in the first.
        """
        by_type = [self.space.chain.range_costs(Size(share), device_type) for device_type in device_types]
        forwards = [self._sums(_row(costs, "fwd_ns")) for costs in by_type]
        backwards = [self._sums(_row(costs, "bwd_ns")) for costs in by_type]
        asked = self.space.asked_blocks >= 0
        again = by_speed([self._sums(np.where(asked, _row(costs, "fwd_ns"), 0)) for costs in by_type])
        tail = np.min([self._by_length(costs.largest["tail_ns"]) for costs in by_type], axis=0)
        forward, backward = by_speed(forwards), by_speed(backwards)
        both_ways = by_speed([one + other for one, other in zip(forwards, backwards, strict=True)])
        time = np.where(self._legal(self.space.legal), both_ways + again, INFEASIBLE)
        return np.maximum(forward - again - tail, 0), backward, time

    @_remembered
    def _copying(self, replicas: int, device_types: tuple[int, ...]) -> Ints:
        """Return about the nanoseconds of `copying_ns`: what passes by the stage counts as if it entered and left."""
        costs = self.space.chain.range_costs(Size(self._rows))
        devices = [self.space.costs.device_types[device_type] for device_type in device_types]
        leaves = 2 * costs.crossing[ends_of(self.space.chain.n, self.longest)]
        size = (self._by_length(costs.enters) + self._by_length(costs.returns) + leaves) // replicas
        return np.asarray(size * (copying_ns(1 << 30, devices) / (1 << 30))).astype(np.int64)

    @_remembered
    def _arriving(self, latency_ns: int, ns_per_byte: float) -> Ints:
        """Return the nanoseconds of messages into the stage, both ways, each alone on its ports."""
        costs = self.space.chain.range_costs(Size(self._rows))
        activations, gradients = self._by_length(costs.enters), self._by_length(costs.returns)
        return alone_ns(activations, latency_ns, ns_per_byte) + alone_ns(gradients, latency_ns, ns_per_byte)

    @_remembered
    def _following(
        self, share: int, replicas: int, ring: tuple[int, float], summing: float, device_types: tuple[int, ...]
    ) -> Ints:
        """Return the nanoseconds behind the last backward: the sum of gradients as far as not hidden, the optimizer.

        A sum is two turns of the ring.  Where replicas share the optimizer state, new values take one of them, after
        each has updated its own; the request or the faster way decides.  share: rows of a replica's micro-batch; 0 if
        no sum is hidden.
        """
        request = self.space.request
        trained = self._by_length(self.space.chain.trained)
        devices = [self.space.costs.device_types[device_type] for device_type in device_types]
        slowest = max(optimizer_ns(1 << 30, request.state_factor, device) for device in devices) / (1 << 30)
        sent = (trained * self.space.summed_per_trained).astype(np.int64)
        backward = self._times(share, device_types)[1] if share else None

        def summed(turns: int) -> Ints:
            load = turns * ring[0], turns * ring[1]
            reduce = alone_ns(sent, *load)
            if backward is not None and load[1]:
                last = alone_ns(np.minimum(sent, request.bucket_bytes), *load)
                reduce = np.maximum(reduce - backward, last)
            return reduce

        owned = np.maximum(trained / replicas, self._by_length(self.space.chain.largest_trained))
        kept, shared = (np.asarray(own * slowest).astype(np.int64) for own in (trained, owned))
        ways = []
        if request.zero != 1:
            ways.append(summed(2) + kept)
        if replicas > 1 and request.may_shard:
            ways.append(summed(1) + shared + alone_ns(trained, *ring))
        return np.asarray(np.min(ways or [kept], axis=0) + (sent * summing).astype(np.int64))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _recomputed(self, live: int, replicas: int, share: int, place: _Place) -> Floats | None:
        """Return the share of the blocks of each range to recompute, above 1 if all are not enough; None: none."""
        request = self.space.request
        memory = self._memory(share, place.device_types, replicas)
        static = memory.static
        if not find(self.schedule).synchronous:  # older versions of the weights
            streaming = -(-(live - 1) // len(self.micro_rows)) if streams(find(self.schedule)) else live - 1
            versions = 1 if self.schedule == DELAYED else streaming
            static = static + versions * self._by_length(self.space.chain.weights)
        over = static + np.where(self._learns, live, 1) * memory.held - place.memory_bytes
        recompute_all = request.recompute == "all"
        if not recompute_all and not (over > 0).any():
            return None
        in_groups = np.full(over.shape, 2.0)
        freed = _freed_in_groups(live, memory)
        np.divide(over, freed, out=in_groups, where=freed > 0)
        if recompute_all:
            return np.where(self._learns, np.where(in_groups <= 1.0, 1.0, 2.0), np.where(over > 0, 2.0, 0.0))
        if not request.may_recompute:
            return np.where(over > 0, 2.0, 0.0)
        blocks = np.full(over.shape, 2.0)
        heaviest = self.space.chain.range_costs(Size(share), place.device_types[0]).largest["saved_bytes"]
        excess = over + np.maximum(self._by_length(heaviest) - memory.redone, 0)
        np.divide(excess, live * memory.gained, out=blocks, where=memory.gained > 0)
        np.minimum(blocks, in_groups, out=blocks)
        blocks[over <= 0] = 0.0
        return blocks

    @_remembered
    def _memory(self, share: int, device_types: tuple[int, ...], replicas: int) -> _Memory:
        chain, costs = self.space.chain, self.space.chain.range_costs(Size(share), device_types[0])
        weights, trained, enters = map(self._by_length, (chain.weights, chain.trained, costs.enters))
        owned = trained
        if self.space.request.may_shard:  # a replica's share, of whole parameters
            owned = np.maximum(trained / replicas, self._by_length(chain.largest_trained))
        summed = trained * self.space.summed_per_trained
        state = (summed + owned * self.space.request.state_factor).astype(np.int64)
        under_way = np.where(self._learns, MESSAGES_AHEAD, max(MESSAGES_AHEAD, len(self.micro_rows))).astype(np.int64)
        messages = MESSAGES_AHEAD * enters + under_way * costs.crossing[ends_of(chain.n, self.longest)]
        saved, edges, redone = self._asked_memory(costs)
        static = weights + state + self._by_length(costs.largest["scratch_bytes"]) + messages + redone
        sizes = zip(chain.blocks.values, chain.range_costs(Size(self._rows)).sizes.tolist(), strict=True)
        inputs = sum(size for value, size in sizes if value.name in chain.blocks.inputs)
        static[0] += len(self.micro_rows) * -(-inputs // replicas)
        least = self._by_length(costs.least_crossing)
        gained = saved - self._by_length(costs.kept) + edges
        return _Memory(static, saved + enters, gained, saved, least, redone)

    def _asked_memory(self, costs: RangeCosts) -> tuple[Ints, Ints, Ints]:
        """Return bytes of every range, given the groups that are recomputed in any case.

        They are the bytes saved, where such a group saves its inputs; those that cross boundaries inside of a group;
        and those that the largest group saves while it runs again.
        """
        saved, crossing, groups = _row(costs, "saved_bytes"), costs.crossing[:-1], self.space.asked_blocks
        inside = groups >= 0
        if not inside.any():
            nothing = np.zeros_like(self._sums(saved))
            return self._sums(saved), nothing, nothing
        first = inside & (groups != np.concatenate([[-1], groups[:-1]]))
        kept = np.where(inside, np.where(first, crossing, 0), saved)
        whole = np.bincount(groups[inside], weights=saved[inside]).astype(np.int64)
        largest_group = largest(np.where(inside, whole[groups], 0))
        edges = np.where(inside & ~first, crossing, 0)
        return self._sums(kept), self._sums(edges), self._by_length(largest_group)

    # ---- ranges by length ------------------------------------------------------------------------------------------

    def _sums(self, amounts: Ints) -> Ints:
        """Return the sum over every range of an amount of each block."""
        sums = np.concatenate([[0], np.cumsum(amounts)]).astype(np.int64)
        return np.asarray(sums[ends_of(self.space.chain.n, self.longest)] - sums[:, None])

    def _by_length(self, matrix: Ints) -> Ints:
        return by_length(matrix, self.longest)

    def _legal(self, legal: Bools) -> Bools:
        n = self.space.chain.n
        inside = np.arange(n + 1)[:, None] + np.arange(self.longest + 1)[None, :] <= n
        return np.asarray(by_length(legal, self.longest) & inside)


def _row(costs: RangeCosts, cost: str) -> Ints:
    return np.asarray(costs.blocks[FIELDS.index(cost)])


def _freed_in_groups(live: int, memory: _Memory) -> Ints:
    """Return the bytes that recomputing all of a range frees, in one or a few equal groups with the cheapest ends."""
    freed = (live - 1) * memory.saved
    for groups in GROUPS:
        apart = live * (memory.saved - (groups - 1) * memory.least) - memory.saved // groups
        apart[:, :groups] = 0
        np.maximum(freed, apart, out=freed)
    return freed


def alone_ns(size_bytes: Ints, latency_ns: int, ns_per_byte: float) -> Ints:
    """Return `PortLoad.alone_ns` of a load of this pace, element by element."""
    if not ns_per_byte:
        return np.zeros_like(size_bytes)
    return np.where(size_bytes > 0, latency_ns + np.ceil(size_bytes * ns_per_byte), 0).astype(np.int64)
