"""Tables for the partition: what every stage [a, b) would cost at a place in the pipeline, as matrices.

The same model as `estimate`, in closed form over ranges: times of a micro-batch's share, messages into the stage over
the port it would use, the sum of gradients and the optimizer behind the last backward, memory with the micro-batches
in flight.  Where memory is short and recomputation allowed, the stage pays for the share of its blocks that has to be
recomputed: excess / what recomputing all of them frees, of its forward.

Wrong where: recomputed blocks free unequal amounts (the judge chooses them one by one); what leaves a stage is all
that crosses its end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from autopart.ir.plan import ASYNC, in_flight
from autopart.passes.cuts import Ints
from autopart.passes.estimate import optimizer_ns
from autopart.passes.layout import Layout
from autopart.passes.line import Sheet
from autopart.passes.partition import FAR, Table
from autopart.passes.space import Space
from autopart.passes.traffic import Load, bundle, ring

Floats = npt.NDArray[np.float64]


class Tables:
    """Tables for one way to cut the batch, one schedule and one layout."""

    def __init__(
        self,
        space: Space,
        layout: Layout,
        micro_rows: tuple[int, ...],
        schedule: str,
        stages: int | None = None,
        shared: dict[object, object] | None = None,
    ) -> None:
        """stages: the number of stages, where it is fixed.  shared: what layouts of one kind have in common."""
        self.space, self.layout, self.schedule, self.stages = space, layout, schedule, stages
        self.rows, self.micros = max(micro_rows), len(micro_rows)
        self._memo: dict[object, object] = {} if shared is None else shared

    def __call__(self, k: int, width: int, used: int) -> Table | None:
        """The table of a stage that is the k-th from the end, on `width` positions, `used` of them to the end."""
        start, replicas = self.layout.depth - used, width * self.layout.copies
        if replicas > self.rows or not self._wanted(k, replicas):
            return None
        ranks = self.layout.ranks(start, width)
        devices = [self.space.setting.cluster.devices[rank] for rank in ranks]
        kinds = tuple(sorted({self.space.setting.kinds.index(device) for device in devices}))
        memory = min(device.memory_bytes for device in devices)
        share = -(-self.rows // replicas)
        work = self._cached(self._work, k, replicas, share, kinds, memory)
        arriving = self._cached(self._arriving, *bundle_into(self.space, self.layout, start, width).pace)
        after = self._cached(self._after, *ring(self.space.setting.cluster, ranks).pace, kinds)
        if self.stages is not None and self.space.request.pins:
            work = np.where(self.space.legal_at(self.stages - k), work, FAR)
        per_step = self.micros * (work + after) if self.schedule == ASYNC else self.micros * work + after
        through = work + arriving
        own = np.where(work < FAR, per_step, FAR)
        return np.minimum(own, FAR), np.minimum(through, FAR)

    def _wanted(self, k: int, replicas: int) -> bool:
        if self.stages is None:
            return True
        fixed = self.space.request.replicas_of(self.stages)
        return fixed is None or (k <= len(fixed) and fixed[self.stages - k] == replicas)

    def _cached(self, make: Callable[..., Ints], *args: object) -> Ints:
        key = (make.__name__, self.rows, self.micros, self.schedule, *args)
        if key not in self._memo:
            self._memo[key] = make(*args)
        found = self._memo[key]
        assert isinstance(found, np.ndarray)
        return found

    def _work(self, k: int, replicas: int, share: int, kinds: tuple[int, ...], memory: int) -> Ints:
        """Nanoseconds of a micro-batch, recomputation included; FAR where the stage may not be or does not fit."""
        sheets = [self.space.line.sheet(share, kind) for kind in kinds]
        forward = np.max([sheet.ranges("fwd_ns") for sheet in sheets], axis=0)
        time = np.max([sheet.ranges("fwd_ns") + sheet.ranges("bwd_ns") for sheet in sheets], axis=0)
        extra = self._recomputed(sheets[0], k, replicas, memory)
        time = time + np.ceil(np.minimum(extra, 1.0) * forward).astype(np.int64)
        return np.where(self.space.legal & (extra <= 1.0), time, FAR)

    def _recomputed(self, sheet: Sheet, k: int, replicas: int, memory: int) -> Floats:
        """[a, b]: share of the blocks that has to be recomputed; above 1 where even that is not enough."""
        line, request = self.space.line, self.space.request
        live = in_flight(self.schedule, 0, k, self.micros)
        saved = sheet.ranges("saved_bytes")
        versions = live - 1 if self.schedule == ASYNC else 0
        static = line.weights * (1 + versions) + (line.trained * (1 + request.state_factor)).astype(np.int64)
        static += sheet.scratch + 2 * (sheet.enters + sheet.crossing[None, :])
        static[0] += self.micros * -(-self._batch_bytes() // replicas)
        over = static + live * (saved + sheet.enters) - memory
        if request.recompute == "all" and request.may_recompute:
            return np.where(static + live * sheet.enters + saved <= memory, 1.0, 2.0)
        share = np.where(over > 0, 2.0, 0.0)
        if request.may_recompute:
            gain = live * (saved - sheet.kept)
            blocks = np.where(gain > 0, (over + sheet.heaviest) / np.maximum(gain, 1), 2.0)
            whole = np.where(over - (live - 1) * saved <= 0, 1.0, 2.0)
            share = np.where(over > 0, np.where(blocks <= 1.0, blocks, whole), 0.0)
        return share

    def _batch_bytes(self) -> int:
        sheet = self.space.line.sheet(self.rows)
        names = [v.name for v in self.space.line.blocks.values]
        size = dict(zip(names, sheet.sizes.tolist(), strict=True))
        return sum(size[name] for name in self.space.line.blocks.inputs)

    def _arriving(self, latency_ns: int, ns_per_byte: float) -> Ints:
        """Messages into the stage, both ways, each alone on its ports."""
        sheet = self.space.line.sheet(self.rows)
        return alone_ns(sheet.enters, latency_ns, ns_per_byte) + alone_ns(sheet.returns, latency_ns, ns_per_byte)

    def _after(self, latency_ns: int, ns_per_byte: float, kinds: tuple[int, ...]) -> Ints:
        """Sum of gradients and optimizer."""
        setting, trained = self.space.setting, self.space.line.trained
        slowest = max(optimizer_ns(1 << 30, self.space.request.state_factor, setting.kinds[kind]) for kind in kinds)
        return alone_ns(trained, latency_ns, ns_per_byte) + np.asarray(trained * (slowest / (1 << 30))).astype(np.int64)


def alone_ns(size_bytes: Ints, latency_ns: int, ns_per_byte: float) -> Ints:
    """`Load.alone_ns` of a load of this pace, element by element."""
    if not ns_per_byte:
        return np.zeros_like(size_bytes)
    return np.where(size_bytes > 0, latency_ns + np.ceil(size_bytes * ns_per_byte), 0).astype(np.int64)


def bundle_into(space: Space, layout: Layout, start: int, width: int) -> Load:
    """The load of messages from a stage as wide as this one, right before it; none into the first position."""
    if start == 0:
        return Load(0, (), (), ())
    before = max(0, start - width)
    senders = layout.ranks(before, start - before)
    return bundle(space.setting.cluster, senders, layout.ranks(start, width))
