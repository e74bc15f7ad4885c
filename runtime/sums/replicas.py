"""Sums of gradients over the replicas of a stage, overlapped with its last backward.

Parameters lie in flat buckets in the order in which the last backward releases their gradients.  The first gradient of
a step moves into its place in the bucket, and the others are added to it there, so that a step holds gradients once.
When it is over they are handed out where they lie, and the next step takes other memory for its buckets.  While the
last backward runs, a bucket that is full is summed at once, without waiting, and buckets are summed in their order, so
that all replicas sum the same ones.  What was not released then (a replica may have no rows in the last micro-batch)
follows at the end.  Every replica has the same sums, so their gradients are equal to the bit.  What is summed is what
this step contributed; weights are in it already (`BatchPlan.shares`).

Where replicas share the optimizer's state, a bucket is cut by owners, and each part is summed at its owner alone (a
reduce, not a reduce-scatter: shares of whole parameters are uneven).  Between two replicas these are the bits that each
would have; between more, rings of other lengths add in another order.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopart.ir.program import BUCKET_BYTES
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.sums.buckets import Bucket, Part, parts_of
from autopart.runtime.sums.sparse_sums import summed_sparse


@dataclass(frozen=True, slots=True)
class Shared:
    """What the replicas of a stage keep alike.  released: parameters that are summed, in the order in which a backward
    releases their gradients.  sparse: of those, the ones whose gradients are sparse.  updated: buffers that change.
    owners: the rank that owns a parameter; all ranks keep those that are not in it.  bucket_bytes: gradients that are
    summed at once."""

    released: tuple[str, ...] = ()
    sparse: frozenset[str] = frozenset()
    updated: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES


class ReplicaSums:
    """Gradients and buffers of one stage of this rank, alike on all its replicas.  Opening the group is collective."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        runner: StageRunner | None,
        shared: Shared,
    ) -> None:
        self._world = world
        self._ranks = ranks
        self._overlaps = world.carrier is None and not world.staged
        self._group = world.group(ranks, purpose="replicas" if self._overlaps else "")
        self._runner = runner
        self._shared = shared
        self._parts: list[Part] | None = None
        self._buckets: dict[int, Bucket] = {}
        self._launched = 0
        self._armed = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """A step begins: gradients collect in the buckets."""
        if self._parts is None:
            names = [name for name in self._shared.released if name not in self._shared.sparse]
            owned = [(parameters[name], self._shared.owners.get(name)) for name in names]
            self._parts = parts_of(owned, self._shared.bucket_bytes)
        self._launched = 0
        self._buckets = {place: Bucket.of(*part) for place, part in enumerate(self._parts)}
        for bucket in self._buckets.values():
            for place, parameter in enumerate(bucket.parameters):
                hook = self._released(bucket, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def arm(self) -> None:
        """The last backward of the step begins: what it releases is summed as it comes, where sums may be under way
        beside messages."""
        self._armed = self._overlaps

    def release(self) -> None:
        """The step is over: parameters keep the gradients that lie in the buckets, and the next step takes new ones."""
        self._buckets = {}

    def _released(self, bucket: Bucket, place: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._armed:
                bucket.take(place)
                self._launch_full()
            else:
                bucket.lend(place)

        return hook

    def _launch_full(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting_for:
            self._launch(self._buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.flag()
        if not self._overlaps:
            self._world.all_reduce(bucket.flat, self._group, to=bucket.owner)
        elif bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        else:
            bucket.work = dist.reduce(bucket.flat, bucket.owner, group=self._group, async_op=True)

    def finish(self, parameters: Mapping[str, torch.nn.Parameter], *, uneven: bool) -> None:
        """Sum what is left and hand out all sums, of a parameter with an owner to that one alone; the buffers of the
        first replica go to all.

        uneven: whether a gradient may be missing on one replica and not on another.
        """
        buckets = self._buckets.values()
        self._disarm()
        for bucket in buckets:
            for place in sorted(bucket.waiting_for):
                bucket.take(place)
        self._launch_full()
        with waiting():
            for bucket in buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                if bucket.owner in (None, self._world.rank):
                    bucket.give(uneven=uneven)
            for name in self._shared.released:
                parameter = parameters.get(name)
                if name in self._shared.sparse and parameter is not None and parameter.requires_grad:
                    parameter.grad = summed_sparse(parameter, self._ranks, self._group)
            self._share_buffers()

    def abandon(self) -> None:
        """The step failed."""
        self._disarm()
        self._buckets = {}

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._armed = False

    def _share_buffers(self) -> None:
        if not self._shared.updated or self._runner is None:
            return
        fresh = self._runner.fresh_buffers(self._shared.updated)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in fresh:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, self._ranks[0], group=self._group)
            for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
