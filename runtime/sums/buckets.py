"""Flat buckets of gradients: which parameters each one holds, and how gradients get in and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopart.ir.program import FIRST_BUCKET_BYTES
from autopart.runtime.masters import gradient_dtype
from autopart.runtime.sums.reduce import wide_dtype
from autopart.runtime.tensors import dense

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
                continue
            if parameter.grad is not None:
                parameter.grad.copy_(total)
            elif flags is not None and flags[place]:
                parameter.grad = total.to(gradient_dtype(parameter))


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
