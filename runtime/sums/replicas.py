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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from autopart.ir.actions import REPLICAS
from autopart.ir.program import BUCKET_BYTES, FIRST_BUCKET_BYTES, Program
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.masters import gradient_dtype
from autopart.runtime.sums.reduce import summed, wide_dtype
from autopart.runtime.tensors import dense, laid_as

Owned = tuple[torch.nn.Parameter, int | None]
"""A parameter and the rank that owns it, None if all ranks keep it."""

Part = tuple[list[torch.nn.Parameter], int | None]
"""The parameters of a bucket, and the rank that owns them."""

ALIGNED_BYTES = 64
"""Each gradient begins at a multiple of this, as in memory of its own: matrix products round by the alignment of what
they add to, and gradients must not depend on which parameters share a bucket."""


@dataclass
class Bucket:
    """The gradients of some parameters, side by side in one tensor, so that one all-reduce sums them all.

    flat: the gradients, each at an aligned place, in a dtype wide enough to accumulate half precision; then one flag
    for each parameter: 1 if this replica has a gradient.  What lies between them is summed too, and never read.
    views: the place of each gradient in `flat`.  owner: the rank that receives the sums, None if all ranks do.
    waiting_for: parameters whose gradient is not complete yet; missing: parameters without a gradient on this rank so
    far.  work: the collective in flight.
    """

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]
    owner: int | None
    waiting_for: set[int]
    missing: set[int]
    work: dist.Work | None = None

    @staticmethod
    def of(parameters: list[torch.nn.Parameter], owner: int | None) -> Bucket:
        """Allocate a bucket."""
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        dtype = wide_dtype(first.dtype)
        unit = ALIGNED_BYTES // dtype.itemsize
        rooms = [-(-size // unit) * unit for size in sizes]
        flat = torch.empty(sum(rooms) + len(sizes), dtype=dtype, device=first.device)
        cuts = [cut for size, room in zip(sizes, rooms, strict=True) for cut in (size, room - size)]
        pieces = torch.split(flat, [*cuts, len(sizes)])[:-1:2]
        # By `.data` they are no views to autograd: nobody could change a view's history in place, and what one user of
        # a gradient writes would count as a change of all others.
        views = [piece.view(p.shape).data for piece, p in zip(pieces, parameters, strict=True)]
        return Bucket(parameters, flat, views, owner, set(range(len(sizes))), set(range(len(sizes))))

    def store(self, place: int) -> None:
        """Copy a gradient into the bucket; if dtypes agree, that place of the bucket becomes the `.grad`."""
        parameter, view = self.parameters[place], self.views[place]
        own = parameter.grad
        if own is not None and own is not view:
            view.copy_(dense(own))
            if view.dtype == gradient_dtype(parameter):
                parameter.grad = view

    def complete(self, place: int) -> None:
        """Store a parameter's final gradient of this step, zeros if it has none."""
        if self.parameters[place].grad is None:
            self.views[place].zero_()
        else:
            self.store(place)
            self.missing.discard(place)
        self.waiting_for.discard(place)

    def complete_rest(self) -> None:
        """Store the gradients of all parameters that wait, as `complete` does, those of one dtype in one kernel."""
        places, views, grads = [], [], []
        for place in sorted(self.waiting_for):
            own, view = self.parameters[place].grad, self.views[place]
            if own is None or own is view or own.layout != torch.strided or own.dtype != view.dtype:
                self.complete(place)
            else:
                places.append(place)
                views.append(view)
                grads.append(own)
        if places:
            torch._foreach_copy_(views, grads)
        for place, view in zip(places, views, strict=True):
            self.parameters[place].grad = view
        self.missing.difference_update(places)
        self.waiting_for.clear()

    def write_flags(self) -> None:
        """Write the flags that tell the other replicas which gradients this one has."""
        flags = self.flat[-len(self.parameters) :].fill_(1)
        for place in self.missing:
            flags[place] = 0

    def hand_out(self, *, uneven: bool) -> None:
        """Write the sums to `.grad`; a parameter without a gradient on every replica keeps None.

        uneven: whether a gradient may be missing on this replica alone; the flags are then read from the device."""
        look = uneven or self.flat.device.type == "cpu"
        flags = self.flat[-len(self.parameters) :].tolist() if look else None
        for place, (parameter, total) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is total:
                parameter.grad = laid_as(parameter, total)
            elif parameter.grad is not None:
                parameter.grad.copy_(total)
            elif flags is not None and flags[place]:
                parameter.grad = laid_as(parameter, total.to(gradient_dtype(parameter)))


def parts_of(parameters: Sequence[Owned], bucket_bytes: int) -> list[Part]:
    """Deal parameters to buckets of one dtype and device, in the order in which buckets fill up.

    A bucket with parameters of several owners is cut into a part for each owner.
    """
    found: list[list[Owned]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Owned]] = {}
    for parameter, owner in parameters:
        if not parameter.requires_grad:
            continue
        group = filling.setdefault((parameter.dtype, parameter.device), [])
        group.append((parameter, owner))
        if sum(p.nbytes for p, _ in group) >= (bucket_bytes if found else min(FIRST_BUCKET_BYTES, bucket_bytes)):
            found.append(filling.pop((parameter.dtype, parameter.device)))
    parts = []
    for group in (*found, *filling.values()):
        for owner in dict.fromkeys(owner for _, owner in group):
            parts.append(([parameter for parameter, its in group if its == owner], owner))
    return parts


@dataclass(frozen=True, slots=True)
class Replicated:
    """What the replicas of a stage keep equal.

    released: parameters that are summed, in the order in which a backward releases their gradients.  sparse: those with
    sparse gradients.  updated: buffers that change.  owners: the rank that owns a parameter; all ranks keep the others.
    bucket_bytes: gradients that are summed at once.  parted: those of which a rank has a piece; these are summed over
    the replicas with the same one.
    """

    released: tuple[str, ...] = ()
    sparse: frozenset[str] = frozenset()
    updated: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES
    parted: frozenset[str] = frozenset()


def open_sums(world: World, program: Program, of: Mapping[int, Replicated]) -> dict[int, ReplicaSums]:
    """Open the sums of the stages that this rank trains with other replicas.  Collective: all ranks open all groups.

    Stages of the same ranks have groups of their own: which of them is ready first may differ between replicas, as one
    may have no rows in the last micro-batch.  of: what is kept equal, for the stages of this rank.
    """
    found = {}
    opened: Counter[tuple[int, ...]] = Counter()
    stages = [stages[0] for stages in program.groups(REPLICAS)]
    for stage in dict.fromkeys(a.stage for a in program.order if a.kind in ("R", "U") and a.stage in stages):
        ranks = program.stage_ranks[stage]
        members = tuple(sorted(ranks))
        own = f"{opened[members] or ''}" if world.overlaps else ""
        group = world.group(members, purpose=f"replicas{own}" if world.overlaps else "")
        opened[members] += 1
        alike = _open_parts(world, program, stage, f"pieces{own}")
        if world.rank in ranks:
            found[stage] = ReplicaSums(world, ranks[0], group, of[stage], alike)
    return found


def _open_parts(world: World, program: Program, stage: int, purpose: str) -> dist.ProcessGroup | None:
    """Open the groups of ranks that have the same pieces, and return that of this rank; None without others."""
    divided, ranks, found = program.division(stage), program.stage_ranks[stage], None
    for first in range(divided.shards if min(divided.shards, divided.count) > 1 else 0):
        group = world.group(ranks[first :: divided.shards], purpose=purpose)
        found = group if world.rank in ranks[first :: divided.shards] else found
    return found


class ReplicaSums:
    """Gradients and buffers of one stage of this rank.  first: the replica whose buffers all take.  alike: replicas
    with the same pieces, None without."""

    def __init__(
        self,
        world: World,
        first: int,
        group: dist.ProcessGroup,
        kept: Replicated,
        alike: dist.ProcessGroup | None = None,
    ) -> None:
        self._world, self._first, self._group, self._kept, self._alike = world, first, group, kept, alike
        self.updated = kept.updated
        self._parts: list[Part] | None = None
        self._buckets: list[Bucket] = []
        self._pieces: list[bool] = []
        self._launched = 0
        self._armed = False
        self._watched: list[torch.nn.Parameter] = []

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Begin a step: gradients collect in new buckets."""
        if self._parts is None:
            dealt = self._dealt(parameters)
            self._parts, self._pieces = [part for part, _ in dealt], [pieces for _, pieces in dealt]
        self._launched = 0
        self._buckets = [Bucket.of(*part) for part in self._parts]
        owners = len({bucket.owner for bucket in self._buckets})
        for number, bucket in enumerate(self._buckets):  # for this step alone: other captures of the model refuse hooks
            if number >= len(self._buckets) - owners and bucket.flat.nbytes <= BUCKET_BYTES:
                continue  # full when the backward ends, and small enough to be there twice for a moment
            for place, parameter in enumerate(bucket.parameters):
                _gradient_hooks(parameter)[self] = partial(self._released, bucket, place)
            self._watched += bucket.parameters

    def _dealt(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[tuple[Part, bool]]:
        """Return parts of buckets in the order in which they are full, and whether they hold pieces.

        Ranks with other pieces may have other owners of them, and parts in another order; what all ranks sum stands in
        one order on all, and pieces are summed by ranks with one order, so no two of them wait for each other."""
        kept, found = self._kept, list[tuple[Part, bool]]()
        for pieces in (False, True) if self._alike is not None else (False,):
            names = [n for n in kept.released if n not in kept.sparse and (n in kept.parted) == pieces]
            owned = [(parameters[name], kept.owners.get(name)) for name in names]
            found += [(part, pieces) for part in parts_of(owned, kept.bucket_bytes)]
        place = {id(parameters[name]): number for number, name in enumerate(kept.released)}
        return sorted(found, key=lambda each: max(place[id(parameter)] for parameter in each[0][0]))

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
            alike = self._alike if self._pieces[self._launched] else None
            self._launch(self._buckets[self._launched], alike or self._group)
            self._launched += 1

    def _launch(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        bucket.write_flags()
        if not self._world.overlaps:
            self._world.all_reduce(bucket.flat, group, to=bucket.owner)
        elif bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        else:
            bucket.work = dist.reduce(bucket.flat, bucket.owner, group=group, async_op=True)

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
