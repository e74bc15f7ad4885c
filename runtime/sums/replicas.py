"""Sums of gradients over the replicas of a stage, overlapped with its last backward.

Parameters lie in flat buckets in the order in which the last backward releases their gradients.  The first gradient of
a step moves into its place in the bucket and the others are added there, so a step holds gradients once; afterwards
parameters keep them in place, and the next step allocates other buckets.  During the last backward a bucket that is
full is summed at once, without waiting, in the order of buckets, which is the same on all replicas.  The last bucket,
and what else is missing (a replica may have no rows in the last micro-batch), follows at the end; its gradients move
there then, all at once.  All replicas get the same sums, equal to the
bit.  Only what this step contributed is summed; it is weighted already (`BatchPlan.shares`).

With ZeRO a bucket is cut by owners, and each part is summed at its owner alone (a reduce, not a reduce-scatter, since
shares of whole parameters are uneven).  Between two replicas the result has the same bits as an all-reduce; between
more, rings of other lengths add in another order.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), section 3.2.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from autopart.ir.program import BUCKET_BYTES, Program
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.sums.buckets import Bucket, Part, parts_of
from autopart.runtime.sums.reduce import summed


@dataclass(frozen=True, slots=True)
class Replicated:
    """What the replicas of a stage keep equal.

    released: parameters that are summed, in the order in which a backward releases their gradients.  sparse: those with
    sparse gradients.  updated: buffers that change.  owners: the rank that owns a parameter; all ranks keep the others.
    bucket_bytes: gradients that are summed at once.
    """

    released: tuple[str, ...] = ()
    sparse: frozenset[str] = frozenset()
    updated: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES


def open_sums(world: World, program: Program, of: Mapping[int, Replicated]) -> dict[int, ReplicaSums]:
    """Open the sums of the stages that this rank trains with other replicas.  Collective: all ranks open all groups.

    Stages of the same ranks have groups of their own: which of them is ready first may differ between replicas, as one
    may have no rows in the last micro-batch.  of: what is kept equal, for the stages of this rank.
    """
    found = {}
    opened: Counter[tuple[int, ...]] = Counter()
    for stage in dict.fromkeys(action.stage for action in program.order if action.kind == "R"):
        ranks = program.stage_ranks[stage]
        members = tuple(sorted(ranks))
        group = world.group(members, purpose=f"replicas{opened[members] or ''}" if world.overlaps else "")
        opened[members] += 1
        if world.rank in ranks:
            found[stage] = ReplicaSums(world, ranks[0], group, of[stage])
    return found


class ReplicaSums:
    """Gradients and buffers of one stage of this rank.  first: the replica whose buffers all take."""

    def __init__(self, world: World, first: int, group: dist.ProcessGroup, kept: Replicated) -> None:
        self._world, self._first, self._group, self._kept = world, first, group, kept
        self.updated = kept.updated
        self._parts: list[Part] | None = None
        self._buckets: list[Bucket] = []
        self._launched = 0
        self._armed = False
        self._watched: list[torch.nn.Parameter] = []

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Begin a step: gradients collect in new buckets."""
        if self._parts is None:
            names = [name for name in self._kept.released if name not in self._kept.sparse]
            owned = [(parameters[name], self._kept.owners.get(name)) for name in names]
            self._parts = parts_of(owned, self._kept.bucket_bytes)
        self._launched = 0
        self._buckets = [Bucket.of(*part) for part in self._parts]
        owners = len({bucket.owner for bucket in self._buckets})
        for number, bucket in enumerate(self._buckets):  # for this step alone: other captures of the model refuse hooks
            if number >= len(self._buckets) - owners and bucket.flat.nbytes <= BUCKET_BYTES:
                continue  # full when the backward ends, and small enough to be there twice for a moment
            for place, parameter in enumerate(bucket.parameters):
                _gradient_hooks(parameter)[self] = partial(self._released, bucket, place)
            self._watched += bucket.parameters

    def arm(self, later: Iterable[torch.Tensor] | None = None) -> None:
        """Sum what the last backward, which begins now, releases, as it comes, if sums may overlap with messages.

        later: the parameters that a backward of weights adds to; the gradients of all others are complete then.
        """
        self._armed = self._world.overlaps
        if later is not None:
            waiting_for = {id(parameter) for parameter in later}
            for parameter in self._watched:
                if id(parameter) not in waiting_for:
                    self.complete(parameter)

    def complete(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter to which a backward of weights adds no more."""
        hook = _gradient_hooks(parameter).get(self)
        if hook is not None:
            hook(parameter)

    def release(self) -> None:
        """End the step, which may have failed: parameters keep the gradients that lie in the buckets."""
        self._disarm()
        self._buckets = []

    def _disarm(self) -> None:
        for parameter in self._watched:
            _gradient_hooks(parameter).pop(self, None)
        self._watched.clear()
        self._armed = False

    def _released(self, bucket: Bucket, place: int, _: torch.Tensor) -> None:
        if self._armed:
            bucket.complete(place)
            self._launch_full()
        else:
            bucket.store(place)

    def _launch_full(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting_for:
            self._launch(self._buckets[self._launched])
            self._launched += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.write_flags()
        if not self._world.overlaps:
            self._world.all_reduce(bucket.flat, self._group, to=bucket.owner)
        elif bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        else:
            bucket.work = dist.reduce(bucket.flat, bucket.owner, group=self._group, async_op=True)

    def finish(
        self, parameters: Mapping[str, torch.nn.Parameter], new_buffers: Iterable[torch.Tensor], *, uneven: bool
    ) -> None:
        """Sum the remaining buckets and write all sums to `.grad`, of a parameter with an owner on that rank alone.
        Buffers become those of the first replica.

        uneven: whether a gradient may be missing on some replicas only.
        """
        buckets = self._buckets
        self._disarm()
        for bucket in buckets:
            bucket.complete_rest()
        self._launch_full()
        with waiting():
            for bucket in buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                if bucket.owner in (None, self._world.rank):
                    bucket.hand_out(uneven=uneven)
            for name in self._kept.released:
                if name in self._kept.sparse and parameters[name].requires_grad:
                    parameters[name].grad = summed(self._world, parameters[name], self._group, sparse=True)
            self._share(new_buffers)

    def _share(self, new_buffers: Iterable[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in new_buffers:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, self._first, group=self._group)
            for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _gradient_hooks(parameter: torch.Tensor) -> dict[object, Callable[[torch.Tensor], None]]:
    """Return the hooks that run when a gradient was added, as `register_post_accumulate_grad_hook` keeps them.

    Its handles are counted (`RemovableHandle.next_id`), and a count that changes makes the next step look for hooks of
    the user in the whole model, which takes milliseconds.
    """
    found: dict[object, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    if found is None:
        found = parameter._post_accumulate_grad_hooks = OrderedDict()
    return found
