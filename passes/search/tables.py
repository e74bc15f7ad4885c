"""Tables for the partition: what every stage [a, b) would cost at a place in the pipeline, over (a, b - a).

The same model as `estimate`, in closed form over ranges: times of a micro-batch's share, messages into the stage over
the port it would use, the sum of gradients and the optimizer behind the last backward, memory with the micro-batches
in flight.  Where memory is short and recomputation allowed, the stage pays for the share of its blocks that has to be
recomputed: excess / what recomputing all of them frees, of its forward.

Wrong where: recomputed blocks free unequal amounts (the judge chooses them one by one); what leaves a stage is all
that crosses its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopart.ir.plan import ASYNC, in_flight
from autopart.passes.graph.chain import RangeCosts
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import INFEASIBLE, Table, by_length, ends_of
from autopart.passes.search.space import Bools, SearchSpace
from autopart.passes.simulation.estimate import copying_ns, optimizer_ns
from autopart.passes.simulation.traffic import PortLoad

Floats = npt.NDArray[np.float64]


class _Place(NamedTuple):
    """Kinds and least memory of a stage's devices; pace of messages into it and of the sum over its replicas."""

    kinds: tuple[int, ...]
    memory: int
    arriving: tuple[int, float]
    ring: tuple[int, float]


class StageCostTables:
    """Tables for one way to cut the batch, one schedule and one layout."""

    def __init__(
        self,
        space: SearchSpace,
        layout: Layout,
        micro_rows: tuple[int, ...],
        schedule: str,
        stages: int | None = None,
        shared: dict[object, Any] | None = None,
        *,
        roomy: bool = False,
        waits: Ints | None = None,
        length: int | None = None,
    ) -> None:
        """stages: the number of stages, where it is fixed.  shared: what layouts of one kind have in common.  roomy: as
        if memory had no end.  waits: [a, b] is 1 where the stage that begins at b waits for [a, b); None: everywhere.
        length: of the longest range that comes into question.
        """
        self.space, self.layout, self.schedule, self.stages, self.roomy = space, layout, schedule, stages, roomy
        self._length = space.chain.n if length is None else length
        self._waits = None if waits is None else by_length(waits, self._length)
        self.rows, self.micros = max(micro_rows), len(micro_rows)
        self._memo: dict[object, Any] = {} if shared is None else shared

    def __call__(self, k: int, width: int, used: int) -> Table | None:
        """The table of a stage that is the k-th from the end, on `width` positions, `used` of them to the end."""
        replicas = width * self.layout.copies
        if replicas > self.rows or not self._wanted(k, replicas):
            return None
        place = self._place(self.layout.depth - used, width)
        if len(self.layout.widths) == 1:
            return self._table(k, replicas, place)  # asked for once: not worth its memory
        key = ("table", self.rows, self.micros, self.schedule, k if self._by_stage else self._live(k), replicas, place,
            self._waits is None)  # fmt: skip
        if key not in self._memo:
            self._memo[key] = self._table(k, replicas, place)
        found: Table = self._memo[key]
        return found

    def _place(self, start: int, width: int) -> _Place:
        """What the position of a stage means for its costs."""
        key = ("place", self.layout, start, width)
        if key not in self._memo:
            setting, ranks = self.space.costs, self.layout.ranks(start, width)
            devices = [setting.cluster.devices[rank] for rank in ranks]
            kinds = tuple(sorted({setting.kinds.index(device) for device in devices}))
            memory = INFEASIBLE if self.roomy else setting.cluster.least_memory_bytes(ranks)
            arriving = bundle_into(self.space, self.layout, start, width).pace
            self._memo[key] = _Place(kinds, memory, arriving, setting.ring(ranks).pace)
        place: _Place = self._memo[key]
        return place

    @property
    def _by_stage(self) -> bool:
        """Whether the number of a stage matters beyond its micro-batches in flight."""
        return self.stages is not None

    def _live(self, k: int) -> int:
        return in_flight(self.schedule, 0, k, self.micros)

    def _table(self, k: int, replicas: int, place: _Place) -> Table:
        share = -(-self.rows // replicas)
        work = self._work(self._live(k), replicas, share, place)
        arriving = self._cached(self._arriving, *place.arriving)
        after = self._cached(self._after, *place.ring, place.kinds)
        if self.stages is not None and self.space.request.pins:
            work = np.where(self._legal(self.space.legal_at(self.stages - k)), work, INFEASIBLE)
        per_step = self.micros * (work + after) if self.schedule == ASYNC else self.micros * work + after
        own = np.where(work < INFEASIBLE, per_step, INFEASIBLE)
        through = np.minimum(work + arriving, INFEASIBLE)
        return np.minimum(own, INFEASIBLE), through if self._waits is None else np.where(self._waits, through, 0)

    def _wanted(self, k: int, replicas: int) -> bool:
        if self.stages is None:
            return True
        fixed = self.space.request.replicas_of(self.stages)
        return fixed is None or (len(fixed) == self.stages and fixed[self.stages - k] == replicas)

    def _cached(self, make: Callable[..., Ints], *args: object) -> Ints:
        key = (make.__name__, self.rows, self.micros, self.schedule, self._length, *args)
        if key not in self._memo:
            self._memo[key] = make(*args)
        found: Ints = self._memo[key]
        return found

    def _work(self, live: int, replicas: int, share: int, place: _Place) -> Ints:
        """Nanoseconds of a micro-batch, recomputation included; FAR where the stage may not be or does not fit."""
        forward, time = self._cached(self._times, share, place.kinds)
        if any(self.space.costs.kinds[kind].kind == "cpu" for kind in place.kinds):
            time = time + self._cached(self._copying, replicas, place.kinds)
        again = self._recomputed(live, replicas, share, place)
        if again is None:
            return np.asarray(time)
        extra = np.ceil(np.minimum(again, 1.0) * forward).astype(np.int64)
        return np.where(again <= 1.0, time + extra, INFEASIBLE)

    def _times(self, share: int, kinds: tuple[int, ...]) -> Ints:
        """(forward, both ways; FAR where the stage may not be) of every range."""
        sheets = [self.space.chain.sheet(share, kind) for kind in kinds]
        forwards = [self._sums(sheet, "fwd_ns") for sheet in sheets]
        forward = np.max(forwards, axis=0)
        time = np.max([f + self._sums(sheet, "bwd_ns") for f, sheet in zip(forwards, sheets, strict=True)], axis=0)
        return np.stack([forward, np.where(self._legal(self.space.legal), time, INFEASIBLE)])

    def _copying(self, replicas: int, kinds: tuple[int, ...]) -> Ints:
        """Nanoseconds of `copying_ns`, about: what only passes by the stage counts as if it left it, both ways."""
        sheet, devices = self.space.chain.sheet(self.rows), [self.space.costs.kinds[kind] for kind in kinds]
        leaves = 2 * sheet.crossing[ends_of(self.space.chain.n, self._length)]
        size = (self._by_length(sheet.enters) + self._by_length(sheet.returns) + leaves) // replicas
        return np.asarray(size * (copying_ns(1 << 30, devices) / (1 << 30))).astype(np.int64)

    def _sums(self, sheet: RangeCosts, field: str) -> Ints:
        sums = sheet.sums(field)
        return np.asarray(sums[ends_of(self.space.chain.n, self._length)] - sums[:, None])

    def _by_length(self, matrix: Ints) -> Ints:
        return by_length(matrix, self._length)

    def _legal(self, legal: Bools) -> Bools:
        n = self.space.chain.n
        inside = np.arange(n + 1)[:, None] + np.arange(self._length + 1)[None, :] <= n
        return np.asarray(by_length(legal, self._length) & inside)

    def _fixed(self, share: int, kinds: tuple[int, ...], replicas: int) -> Ints:
        """(bytes that do not depend on the micro-batches in flight, bytes of each of them, what recomputing all blocks
        frees of each, saved bytes) of every range."""
        line, request, sheet = self.space.chain, self.space.request, self.space.chain.sheet(share, kinds[0])
        weights, trained, enters = map(self._by_length, (line.weights, line.trained, sheet.enters))
        static = weights + (trained * (1 + request.state_factor)).astype(np.int64) + self._by_length(sheet.scratch)
        static += 2 * (enters + sheet.crossing[ends_of(line.n, self._length)])
        static[0] += self.micros * -(-self._batch_bytes() // replicas)
        saved = self._sums(sheet, "saved_bytes")
        return np.stack([static, saved + enters, saved - self._by_length(sheet.kept), saved])

    def _recomputed(self, live: int, replicas: int, share: int, place: _Place) -> Floats | None:
        """[a, b]: share of the blocks that has to be recomputed, above 1 where even that is not enough; None: none."""
        line, request = self.space.chain, self.space.request
        static, held, gained, saved = self._cached(self._fixed, share, place.kinds, replicas)
        if self.schedule == ASYNC:
            static = static + (live - 1) * self._by_length(line.weights)
        over = static + live * held - place.memory
        all_of_it = request.recompute == "all" and request.may_recompute
        if not all_of_it and not (over > 0).any():
            return None
        whole = np.where(over <= (live - 1) * saved, 1.0, 2.0)
        if all_of_it:
            return whole
        if not request.may_recompute:
            return np.where(over > 0, 2.0, 0.0)
        blocks = np.full(over.shape, 2.0)
        heaviest = self._cached(self._heaviest, share, place.kinds[0])
        np.divide(over + heaviest, live * gained, out=blocks, where=gained > 0)
        np.copyto(blocks, whole, where=blocks > 1.0)
        blocks[over <= 0] = 0.0
        return blocks

    def _heaviest(self, share: int, kind: int) -> Ints:
        return self._by_length(self.space.chain.sheet(share, kind).heaviest)

    def _batch_bytes(self) -> int:
        sheet = self.space.chain.sheet(self.rows)
        names = [v.name for v in self.space.chain.blocks.values]
        size = dict(zip(names, sheet.sizes.tolist(), strict=True))
        return sum(size[name] for name in self.space.chain.blocks.inputs)

    def _arriving(self, latency_ns: int, ns_per_byte: float) -> Ints:
        """Messages into the stage, both ways, each alone on its ports."""
        sheet = self.space.chain.sheet(self.rows)
        ways = self._by_length(sheet.enters), self._by_length(sheet.returns)
        return alone_ns(ways[0], latency_ns, ns_per_byte) + alone_ns(ways[1], latency_ns, ns_per_byte)

    def _after(self, latency_ns: int, ns_per_byte: float, kinds: tuple[int, ...]) -> Ints:
        """Sum of gradients and optimizer."""
        setting, trained = self.space.costs, self._by_length(self.space.chain.trained)
        slowest = max(optimizer_ns(1 << 30, self.space.request.state_factor, setting.kinds[kind]) for kind in kinds)
        return alone_ns(trained, latency_ns, ns_per_byte) + np.asarray(trained * (slowest / (1 << 30))).astype(np.int64)


def alone_ns(size_bytes: Ints, latency_ns: int, ns_per_byte: float) -> Ints:
    """`Load.alone_ns`, in nanoseconds, of a load of this pace, element by element.  size_bytes: in bytes."""
    if not ns_per_byte:
        return np.zeros_like(size_bytes)
    return np.where(size_bytes > 0, latency_ns + np.ceil(size_bytes * ns_per_byte), 0).astype(np.int64)


def bundle_into(space: SearchSpace, layout: Layout, start: int, width: int) -> PortLoad:
    """The load of messages from a stage as wide as this one, right before it; none into the first position."""
    if start == 0:
        return PortLoad(0, (), (), ())
    before = max(0, start - width)
    senders = layout.ranks(before, start - before)
    return space.costs.bundle(senders, layout.ranks(start, width))
