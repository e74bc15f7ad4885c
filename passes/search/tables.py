"""Tables for the partition: what every stage [a, b) would cost at a place in the pipeline, over (a, b - a).

The same model as `estimate`, in closed form over ranges: times of a replica's share of a micro-batch, messages into the
stage over the port it would use, the sum of gradients and the optimizer behind the last backward, memory with the
micro-batches in flight.  Where memory is short and recomputation allowed, the stage pays for the share of its blocks
that has to be recomputed: excess / what recomputing all of them frees, alone or in groups, of its forward.

Devices that are not alike share the rows by speed, to fractions of rows.

Wrong where: recomputed blocks free unequal amounts (the evaluator chooses them one by one); what leaves a stage is all
that crosses its end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from autopart.ir.program import MESSAGES_AHEAD
from autopart.ir.size import Size
from autopart.passes.graph.chain import RangeCosts, largest
from autopart.passes.graph.cuts import Ints
from autopart.passes.ops.cost_model import FIELDS
from autopart.passes.program.schedules import Shape, find, in_flight
from autopart.passes.search.layout import Layout, by_speed
from autopart.passes.search.partition import INFEASIBLE, Table, by_length, ends_of
from autopart.passes.search.space import Bools, SearchSpace
from autopart.passes.simulation.stage_costs import copying_ns, optimizer_ns, summing_ns
from autopart.passes.simulation.traffic import PortLoad

GROUPS = (2, 4, 8)
"""Groups into which a range may be recomputed, besides one."""

Floats = npt.NDArray[np.float64]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TableRequest:
    """What tables are wanted for: one way to cut the batch, one schedule and one layout.

    stages: the number of stages, where it is fixed.  ignore_memory: as if memory had no end.  waits: [a, b] is 1 where
    the stage that begins at b waits for [a, b); None: everywhere.  longest: blocks of the longest range that comes into
    question; None: all.
    """

    space: SearchSpace
    layout: Layout
    micro_rows: tuple[int, ...]
    schedule: str
    stages: int | None = None
    ignore_memory: bool = False
    waits: Ints | None = None
    longest: int | None = None


TableMemo = dict[Hashable, Any]
"""What the tables of several requests have in common, by what it is and depends on, each computed once.

One memo serves requests with equal spaces, micro-batches and schedules, whatever their layouts."""

_Self = TypeVar("_Self", bound="StageCostTables")
_Args = ParamSpec("_Args")


def _remembered(
    compute: Callable[Concatenate[_Self, _Args], _T],
) -> Callable[Concatenate[_Self, _Args], _T]:
    """Remember in the tables' memo what a method returns, by its arguments and the longest range."""

    def known(self: _Self, /, *args: _Args.args, **options: _Args.kwargs) -> _T:
        key = compute.__name__, self.longest, args
        if key not in self.memo:
            self.memo[key] = compute(self, *args, **options)
        found: _T = self.memo[key]
        return found

    return known


class _Place(NamedTuple):
    """Device types and least memory of a stage's devices (types of each where they differ, since they share the work);
    pace of messages into it and of a turn of the ring of its replicas; summing: ns per byte that a sum takes of their
    work."""

    device_types: tuple[int, ...]
    memory_bytes: int
    arriving: tuple[int, float]
    ring: tuple[int, float]
    summing: float


class _Memory(NamedTuple):
    """Bytes of every range: that do not depend on the micro-batches in flight, held for each of them, what recomputing
    all other blocks frees of each, saved by each, the fewest that cross a boundary inside, and saved by the largest
    group that is recomputed anyway."""

    static: Ints
    held: Ints
    gained: Ints
    saved: Ints
    least: Ints
    redone: Ints


class StageCostTables:
    """The tables of a request, by place in the pipeline (`partition.TableOf`)."""

    def __init__(self, request: TableRequest, memo: TableMemo | None = None) -> None:
        self._request = request
        self._space = request.space
        self._layout = request.layout
        self._schedule = find(request.schedule)
        self.memo = {} if memo is None else memo
        self._rows = max(request.micro_rows)
        self._micros = len(request.micro_rows)
        self.longest = self._space.chain.n if request.longest is None else request.longest
        self._waits = None if request.waits is None else by_length(request.waits, self.longest)

    def __call__(self, k: int, width: int, used: int) -> Table | None:
        """The table of a stage that is the k-th from the end, on `width` positions, `used` of them to the end."""
        replicas = width * self._layout.pipeline_replicas
        if replicas > self._space.request.most_replicas(self._request.micro_rows) or not self._is_allowed(k, replicas):
            return None
        place = self._place(self._layout, self._layout.depth - used, width)
        if len(self._layout.widths) == 1:
            return self._table(self._live(k), self._pinned_stage(k), replicas, place)  # asked for once: not remembered
        return self._known_table(self._live(k), self._pinned_stage(k), replicas, place, self._waits is None)

    @_remembered
    def _known_table(self, live: int, stage: int | None, replicas: int, place: _Place, everywhere: bool) -> Table:
        """`_table`; everywhere: every stage waits for the one before it."""
        return self._table(live, stage, replicas, place)

    @_remembered
    def _place(self, layout: Layout, start: int, width: int) -> _Place:
        """What the position of a stage means for its costs."""
        costs, ranks = self._space.costs, layout.ranks(start, width)
        devices = [costs.cluster.devices[rank] for rank in ranks]
        device_types = tuple(sorted(costs.device_types.index(device) for device in devices))
        if len(set(device_types)) == 1 or len(ranks) > self._rows:
            device_types = tuple(sorted(set(device_types)))  # the slowest counts
        memory = INFEASIBLE if self._request.ignore_memory else costs.cluster.least_memory_bytes(ranks)
        arriving = load_into(self._space, layout, start, width).pace
        summing = summing_ns(1 << 30, ranks, costs.cluster) / (1 << 30)
        return _Place(device_types, memory, arriving, self._space.loads.ring(ranks, 1).pace, summing)

    def _live(self, k: int) -> int:
        """Micro-batches in flight on the k-th stage from the end.

        Where the number of stages is open, it is taken to be that of the first of k stages: so it is for the built-in
        schedules, and of others the evaluation has the last word.
        """
        stages = self._request.stages
        if stages is None or k > stages:
            return in_flight(self._schedule, 0, Shape(k, self._micros))
        return in_flight(self._schedule, stages - k, Shape(stages, self._micros))

    def _pinned_stage(self, k: int) -> int | None:
        """The number of the stage, where pins make a difference between stages."""
        if self._request.stages is None or not self._space.request.pins:
            return None
        return self._request.stages - k

    def _table(self, live: int, stage: int | None, replicas: int, place: _Place) -> Table:
        """(busy_ns, latency_ns and perhaps turns_ns) of every range.  live: micro-batches in flight; stage: its number,
        where pins make a difference."""
        alternating = replicas if self._space.request.policy == "turn" else 1
        share = -(-self._rows * alternating // replicas)
        work = self._work(live, replicas // alternating, share, place)
        arriving = self._arriving(*place.arriving)
        hides = share if self._space.costs.overlap else 0
        following = self._following(hides, replicas, place.ring, place.summing, place.device_types)
        if stage is not None:
            work = np.where(self._legal(self._space.legal_at(stage)), work, INFEASIBLE)
        # Asynchronous schedules update the weights after every micro-batch.
        steps = 1 if self._schedule.synchronous else self._micros
        step = -(-self._micros // alternating) * work + steps * following
        busy = np.minimum(np.where(work < INFEASIBLE, step, INFEASIBLE), INFEASIBLE)
        latency = np.minimum(work + arriving, INFEASIBLE)
        if self._waits is not None:  # nor is it known who comes back
            return busy, np.where(self._waits, latency, 0)
        turns = self._micros - live - 1  # between the first micro-batch that comes back and the last
        if turns < 0 or alternating > 1 or not self._schedule.synchronous:
            return busy, latency
        return busy, latency, np.minimum(turns * work + following, INFEASIBLE)

    def _is_allowed(self, k: int, replicas: int) -> bool:
        """Whether the stage may have so many replicas."""
        stages = self._request.stages
        if stages is None:
            return True
        fixed = self._space.request.replicas_of(stages)
        return fixed is None or (len(fixed) == stages and fixed[stages - k] == replicas)

    # ---- time ------------------------------------------------------------------------------------------------------

    def _work(self, live: int, replicas: int, share: int, place: _Place) -> Ints:
        """Nanoseconds of a micro-batch, recomputation included; INFEASIBLE where the stage may not be or does not
        fit."""
        forward, _, time = self._times(share, place.device_types)
        costs = self._space.costs
        if any(costs.device_types[device_type].kind == "cpu" for device_type in place.device_types):
            time = time + self._copying(replicas, place.device_types)
        recomputed = self._recomputed(live, replicas, share, place)
        if recomputed is None:
            return time
        extra = np.ceil(np.minimum(recomputed, 1.0) * forward).astype(np.int64)
        return np.where(recomputed <= 1.0, time + extra, INFEASIBLE)

    @_remembered
    def _times(self, share: int, device_types: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
        """(forward of what is not recomputed anyway, but for one block's end that does not run again; backward; both
        ways, INFEASIBLE where the stage may not be) of every range."""
        by_type = [self._space.chain.range_costs(Size(share), device_type) for device_type in device_types]
        forwards = [self._sums(costs, "fwd_ns") for costs in by_type]
        backwards = [self._sums(costs, "bwd_ns") for costs in by_type]
        again = by_speed([self._sums_of(self._asked(costs, "fwd_ns")) for costs in by_type])
        tail = np.min([self._by_length(costs.longest_tail) for costs in by_type], axis=0)
        forward, backward = by_speed(forwards), by_speed(backwards)
        both_ways = by_speed([one + other for one, other in zip(forwards, backwards, strict=True)])
        time = np.where(self._legal(self._space.legal), both_ways + again, INFEASIBLE)
        return np.maximum(forward - again - tail, 0), backward, time

    @_remembered
    def _copying(self, replicas: int, device_types: tuple[int, ...]) -> Ints:
        """About the nanoseconds of `copying_ns`: what only passes by the stage counts as if it entered and left it,
        both ways."""
        costs = self._space.chain.range_costs(Size(self._rows))
        devices = [self._space.costs.device_types[device_type] for device_type in device_types]
        leaves = 2 * costs.crossing[ends_of(self._space.chain.n, self.longest)]
        size = (self._by_length(costs.enters) + self._by_length(costs.returns) + leaves) // replicas
        return np.asarray(size * (copying_ns(1 << 30, devices) / (1 << 30))).astype(np.int64)

    @_remembered
    def _arriving(self, latency_ns: int, ns_per_byte: float) -> Ints:
        """Messages into the stage, both ways, each alone on its ports."""
        costs = self._space.chain.range_costs(Size(self._rows))
        activations, gradients = self._by_length(costs.enters), self._by_length(costs.returns)
        return alone_ns(activations, latency_ns, ns_per_byte) + alone_ns(gradients, latency_ns, ns_per_byte)

    @_remembered
    def _following(
        self, share: int, replicas: int, ring: tuple[int, float], summing: float, device_types: tuple[int, ...]
    ) -> Ints:
        """What follows the last backward: what it does not hide of the sum of gradients, and the optimizer.

        A sum is two turns of the ring.  Where replicas share the optimizer's state, new values take one of them, after
        each has updated its own: what is asked for, or else the faster one.  share: rows of a replica's micro-batch; 0
        where no sum is hidden.
        """
        request = self._space.request
        trained = self._by_length(self._space.chain.trained)
        devices = [self._space.costs.device_types[device_type] for device_type in device_types]
        slowest = max(optimizer_ns(1 << 30, request.state_factor, device) for device in devices) / (1 << 30)
        sent = (trained * self._space.summed_per_trained).astype(np.int64)
        backward = self._times(share, device_types)[1] if share else None

        def summed(turns: int) -> Ints:
            load = turns * ring[0], turns * ring[1]
            reduce = alone_ns(sent, *load)
            if backward is not None and load[1]:
                last = alone_ns(np.minimum(sent, request.bucket_bytes), *load)
                reduce = np.maximum(reduce - backward, last)
            return reduce

        owned = np.maximum(trained / replicas, self._by_length(self._space.chain.largest_trained))
        kept, shared = (np.asarray(own * slowest).astype(np.int64) for own in (trained, owned))
        ways = []
        if request.zero != 1:
            ways.append(summed(2) + kept)
        if replicas > 1 and request.may_shard:
            ways.append(summed(1) + shared + alone_ns(trained, *ring))
        return np.asarray(np.min(ways or [kept], axis=0) + (sent * summing).astype(np.int64))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _recomputed(self, live: int, replicas: int, share: int, place: _Place) -> Floats | None:
        """[a, b]: share of the blocks that has to be recomputed, above 1 where even that is not enough; None: none."""
        request = self._space.request
        memory = self._memory(share, place.device_types, replicas)
        static = memory.static
        if not self._schedule.synchronous:
            static = static + (live - 1) * self._by_length(self._space.chain.weights)
        over = static + live * memory.held - place.memory_bytes
        recompute_all = request.recompute == "all" and request.may_recompute
        if not recompute_all and not (over > 0).any():
            return None
        in_groups = np.full(over.shape, 2.0)
        freed = _freed_in_groups(live, memory)
        np.divide(over, freed, out=in_groups, where=freed > 0)
        if recompute_all:
            return np.where(in_groups <= 1.0, 1.0, 2.0)
        if not request.may_recompute:
            return np.where(over > 0, 2.0, 0.0)
        blocks = np.full(over.shape, 2.0)
        excess = over + np.maximum(self._heaviest(share, place.device_types[0]) - memory.redone, 0)
        np.divide(excess, live * memory.gained, out=blocks, where=memory.gained > 0)
        np.minimum(blocks, in_groups, out=blocks)
        blocks[over <= 0] = 0.0
        return blocks

    @_remembered
    def _memory(self, share: int, device_types: tuple[int, ...], replicas: int) -> _Memory:
        chain, costs = self._space.chain, self._space.chain.range_costs(Size(share), device_types[0])
        weights, trained, enters = map(self._by_length, (chain.weights, chain.trained, costs.enters))
        owned = trained
        if self._space.request.may_shard:  # a replica's share, of whole parameters
            owned = np.maximum(trained / replicas, self._by_length(chain.largest_trained))
        summed = trained * self._space.summed_per_trained
        state = (summed + owned * self._space.request.state_factor).astype(np.int64)
        messages = MESSAGES_AHEAD * (enters + costs.crossing[ends_of(chain.n, self.longest)])
        saved, edges, redone = self._asked_memory(costs)
        static = weights + state + self._by_length(costs.scratch) + messages + redone
        static[0] += self._micros * -(-self._batch_bytes() // replicas)
        least = self._by_length(costs.least_crossing)
        gained = saved - self._by_length(costs.kept) + edges
        return _Memory(static, saved + enters, gained, saved, least, redone)

    def _asked_memory(self, costs: RangeCosts) -> tuple[Ints, Ints, Ints]:
        """Bytes of every range: saved, where groups that are recomputed anyway save what enters them; what crosses the
        boundaries inside of these; saved by the largest of them while it runs again."""
        saved, crossing = costs.blocks[FIELDS.index("saved_bytes")], costs.crossing[:-1]
        groups = self._space.asked_blocks
        inside = groups >= 0
        if not inside.any():
            nothing = np.zeros_like(self._sums_of(saved))
            return self._sums_of(saved), nothing, nothing
        first = inside & (groups != np.concatenate([[-1], groups[:-1]]))
        kept = np.where(inside, np.where(first, crossing, 0), saved)
        whole = np.bincount(groups[inside], weights=saved[inside]).astype(np.int64)
        largest_group = largest(np.where(inside, whole[groups], 0))
        edges = np.where(inside & ~first, crossing, 0)
        return self._sums_of(kept), self._sums_of(edges), self._by_length(largest_group)

    def _asked(self, costs: RangeCosts, field: str) -> Ints:
        """A cost of the blocks that are recomputed anyway, 0 of the others."""
        return np.where(self._space.asked_blocks >= 0, costs.blocks[FIELDS.index(field)], 0)

    @_remembered
    def _heaviest(self, share: int, device_type: int) -> Ints:
        """The most bytes that one block of a range saves."""
        return self._by_length(self._space.chain.range_costs(Size(share), device_type).heaviest)

    def _batch_bytes(self) -> int:
        costs = self._space.chain.range_costs(Size(self._rows))
        names = [value.name for value in self._space.chain.blocks.values]
        size = dict(zip(names, costs.sizes.tolist(), strict=True))
        return sum(size[name] for name in self._space.chain.blocks.inputs)

    # ---- ranges by length ------------------------------------------------------------------------------------------

    def _sums(self, costs: RangeCosts, field: str) -> Ints:
        return self._sums_of(costs.blocks[FIELDS.index(field)])

    def _sums_of(self, amounts: Ints) -> Ints:
        """Of an amount of each block, the sum over every range."""
        sums = np.concatenate([[0], np.cumsum(amounts)]).astype(np.int64)
        return np.asarray(sums[ends_of(self._space.chain.n, self.longest)] - sums[:, None])

    def _by_length(self, matrix: Ints) -> Ints:
        return by_length(matrix, self.longest)

    def _legal(self, legal: Bools) -> Bools:
        n = self._space.chain.n
        inside = np.arange(n + 1)[:, None] + np.arange(self.longest + 1)[None, :] <= n
        return np.asarray(by_length(legal, self.longest) & inside)


def _freed_in_groups(live: int, memory: _Memory) -> Ints:
    """Bytes of every range that recomputing all of it frees, in one or a few equal groups between the best places."""
    freed = (live - 1) * memory.saved
    for groups in GROUPS:
        apart = live * (memory.saved - (groups - 1) * memory.least) - memory.saved // groups
        apart[:, :groups] = 0
        np.maximum(freed, apart, out=freed)
    return freed


def alone_ns(size_bytes: Ints, latency_ns: int, ns_per_byte: float) -> Ints:
    """`PortLoad.alone_ns`, in nanoseconds, of a load of this pace, element by element.  size_bytes: in bytes."""
    if not ns_per_byte:
        return np.zeros_like(size_bytes)
    return np.where(size_bytes > 0, latency_ns + np.ceil(size_bytes * ns_per_byte), 0).astype(np.int64)


def load_into(space: SearchSpace, layout: Layout, start: int, width: int) -> PortLoad:
    """The load of messages from a stage as wide as this one, right before it; none into the first position."""
    if start == 0:
        return PortLoad(0, (), (), ())
    before = max(0, start - width)
    senders = layout.ranks(before, start - before)
    return space.loads.p2p(senders, layout.ranks(start, width))
