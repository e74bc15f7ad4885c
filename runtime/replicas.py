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

from autopart.ir.program import BUCKET_BYTES, FIRST_BUCKET_BYTES
from autopart.runtime.activity import waiting
from autopart.runtime.compressed import CompressedSum
from autopart.runtime.reduce import gradient_dtype, wide_dtype
from autopart.runtime.stage import StageRunner
from autopart.runtime.tensors import dense
from autopart.runtime.world import World

Owned = tuple[torch.nn.Parameter, int | None]
"""A parameter and the rank that owns it, None where all keep it."""

Part = tuple[list[torch.nn.Parameter], int | None]
"""What a bucket holds, and its owner."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the replicas of a stage keep alike.  released: parameters that are summed, in the order in which a backward
    releases their gradients.  sparse: of those, the ones whose gradients are sparse.  updated: buffers that change.
    owners: the rank that owns a parameter; all ranks keep those that are not in it.  bucket_bytes: gradients that are
    summed at once.  compress: whether they are rounded to bf16 for that (`compressed`)."""

    released: tuple[str, ...] = ()
    sparse: frozenset[str] = frozenset()
    updated: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES
    compress: bool = False


@dataclass
class Bucket:
    """flat: gradients side by side, wide enough to add up half precision, then for each parameter 1 where this replica
    has a gradient.  views: of each gradient in it.  owner: the rank that gets the sums, None where all do.
    waiting_for: parameters that have yet to come; missing: those without a gradient here, so far.  work, rounded: the
    sum that is under way."""

    parameters: list[torch.nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]
    owner: int | None
    waiting_for: set[int]
    missing: set[int]
    work: dist.Work | None = None
    rounded: CompressedSum | None = None

    @staticmethod
    def of(parameters: list[torch.nn.Parameter], owner: int | None) -> Bucket:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        flat = torch.empty(sum(sizes) + len(sizes), dtype=wide_dtype(first.dtype), device=first.device)
        pieces = torch.split(flat, [*sizes, len(sizes)])[:-1]
        # By `.data` they are no views to autograd: nobody could change a view's history in place, and what one user of
        # a gradient writes would count as a change of all others.
        views = [piece.view(p.shape).data for piece, p in zip(pieces, parameters, strict=True)]
        return Bucket(parameters, flat, views, owner, set(range(len(sizes))), set(range(len(sizes))))

    @property
    def flags(self) -> torch.Tensor:
        return self.flat[-len(self.parameters) :]

    def lend(self, place: int) -> None:
        """Let a parameter have the gradient that it has in the bucket, where its type allows that."""
        parameter, view = self.parameters[place], self.views[place]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(dense(parameter.grad))
            if view.dtype == gradient_dtype(parameter):
                parameter.grad = view

    def take(self, place: int) -> None:
        """The bucket has what a parameter has now."""
        gradient = self.parameters[place].grad
        if gradient is None:
            self.views[place].zero_()
        else:
            self.lend(place)
            self.missing.discard(place)
        self.waiting_for.discard(place)

    def flag(self) -> None:
        """Tell the other replicas which gradients are here, in few operations: mostly all are."""
        flags = self.flags.fill_(1)
        for place in self.missing:
            flags[place] = 0

    def give(self, *, uneven: bool) -> None:
        """Hand out the sums; a parameter without gradient on any replica has none."""
        flags = self.flags.tolist() if uneven or self.flat.device.type == "cpu" else None
        for place, (parameter, total) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is total:
                continue
            if parameter.grad is not None:
                parameter.grad.copy_(total)
            elif flags is not None and flags[place]:
                parameter.grad = total.to(gradient_dtype(parameter))


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
        if self._shared.compress:
            bucket.rounded = CompressedSum(bucket.flat, self._world, self._ranks, self._group, bucket.owner)
        elif not self._overlaps:
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
                if bucket.rounded is not None:
                    bucket.rounded.finish_sending()
            for bucket in buckets:
                if bucket.rounded is not None:
                    bucket.rounded.finish()
                if bucket.work is not None:
                    bucket.work.wait()
                if bucket.owner in (None, self._world.rank):
                    bucket.give(uneven=uneven)
            for name in self._shared.released:
                parameter = parameters.get(name)
                if name in self._shared.sparse and parameter is not None and parameter.requires_grad:
                    parameter.grad = self._summed_sparse(parameter)
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

    def _summed_sparse(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The sum of sparse gradients: all of their entries, of every replica in order."""
        own = (parameter.grad if parameter.grad is not None else _empty_rows(parameter)).coalesce()
        counts = [torch.zeros(1, dtype=torch.int64, device=parameter.device) for _ in self._ranks]
        mine = torch.tensor([own._nnz() if parameter.grad is not None else -1], device=parameter.device)
        dist.all_gather(counts, mine, group=self._group)
        entries = [int(count) for count in counts]
        if max(entries) < 0:
            return None
        most = max(entries)
        indices = _gathered(own.indices().t(), most, self._ranks, self._group)
        values = _gathered(own.values(), most, self._ranks, self._group)
        kept = [slice(0, max(0, count)) for count in entries]
        return torch.sparse_coo_tensor(
            torch.cat([rows[part] for rows, part in zip(indices, kept, strict=True)]).t(),
            torch.cat([rows[part] for rows, part in zip(values, kept, strict=True)]),
            parameter.shape,
        ).coalesce()

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


def parts_of(parameters: Sequence[Owned], bucket_bytes: int) -> list[Part]:
    """What each bucket holds: parameters of one type, in the order in which buckets are full; of several owners, a part
    for each."""
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


def _empty_rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A sparse tensor of the shape of an embedding, without entries."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def _gathered(rows: torch.Tensor, most: int, ranks: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """`rows` of every rank, each filled up to `most`."""
    padded = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(found, padded, group=group)
    return found
