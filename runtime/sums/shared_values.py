"""New values of parameters, sent by the replicas that own them while the run that needs them begins.

With ZeRO (`ir.shares.owners_of`) each rank has updated only its own parameters.  All values are sent before every run,
since nobody knows who changed what.  They go in the order in which the forward reads them, without waiting if they may
overlap with messages; the op that reads one waits for it (`stage_module.awaited`).  Large parameters are received in
place, small ones together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopart.ir.program import BUCKET_BYTES, FIRST_BUCKET_BYTES
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.stages.stage_module import ON_THE_WAY

ALONE_BYTES = 1 << 20
"""Parameters of at least this size are sent by themselves, without a copy."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which rank of a stage keeps the optimizer state of which parameter, of those that hold the same.

    ranks: all of the stage, or those that have the same piece of each parameter (parted).  owners: the rank that owns
    each trained parameter, in the order in which the forward reads them.  bucket_bytes: of values that are sent
    together.
    """

    stage: int
    ranks: tuple[int, ...]
    owners: Mapping[str, int]
    bucket_bytes: int = BUCKET_BYTES
    parted: bool = False


@dataclass(eq=False, slots=True)
class _Part:
    """Values of one owner.  flat: side by side, or the only parameter itself.  mine: whether this rank owns them."""

    parameters: list[torch.Tensor]
    owner: int
    flat: torch.Tensor
    mine: bool
    work: dist.Work | None = None

    @staticmethod
    def of(parameters: list[torch.Tensor], owner: int, *, mine: bool) -> _Part:
        first = parameters[0].detach()
        if len(parameters) == 1 and first.is_contiguous():
            flat = first
        elif mine:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        else:
            flat = first.new_empty(sum(parameter.numel() for parameter in parameters))
        return _Part(parameters, owner, flat, mine)

    def arrive(self) -> None:
        """Wait for the values and write them to the parameters."""
        if self.work is not None:
            with waiting(self.owner):
                self.work.wait()
        if not self.mine and self.flat.data_ptr() != self.parameters[0].data_ptr():
            pieces = torch.split(self.flat, [parameter.numel() for parameter in self.parameters])
            # By `.data`: parameters that are views of one buffer share the version that autograd compares, and a
            # backward may have saved others of them.  Nobody has read these.
            torch._foreach_copy_(
                [parameter.data for parameter in self.parameters],
                [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)],
            )
        self.forget()

    def forget(self) -> None:
        """Wait no more, and free the memory.  Safe to call twice."""
        for parameter in self.parameters:
            ON_THE_WAY.pop(id(parameter), None)
        self.parameters, self.work, self.flat = [], None, self.flat.new_empty(0)


class SharedValues:
    """The parameters of this rank's stages.  Making one opens the groups of all stages, which is collective.

    sharing: who owns what, in the order of stages.  tensors: what this rank holds, by name.  owners: the ranks that own
    what this one holds.
    """

    def __init__(self, world: World, sharing: Sequence[Sharing], tensors: Mapping[str, torch.Tensor]) -> None:
        self._world = world
        self._tensors = tensors
        self._parts: list[_Part] = []
        self._shared: list[tuple[Sharing, dist.ProcessGroup]] = []
        self.owners: dict[str, int] = {}
        sent: set[tuple[frozenset[int], str]] = set()
        for each in sharing:
            of_all = "replicas" if world.overlaps else ""
            group = world.group(each.ranks, purpose="pieces" if each.parted else of_all)
            members = frozenset(each.ranks)
            once = {name: owner for name, owner in each.owners.items() if (members, name) not in sent}
            sent.update((members, name) for name in once)  # by an earlier stage of the same ranks
            if world.rank in each.ranks:
                self.owners.update(each.owners)
                self._shared.append((replace(each, owners=once), group))
        self._dealt: dict[int, list[list[str]]] = {}

    def drop_foreign_gradients(self) -> None:
        """Drop the gradients of parameters that other ranks own."""
        for name, owner in self.owners.items():
            if owner != self._world.rank:
                self._tensors[name].grad = None

    def gather(self) -> None:
        """Get all values.  Collective."""
        try:
            self.begin()
            self.arrive()
        finally:
            self.forget()

    def arrive(self) -> None:
        """Wait until all parameters have their values."""
        for part in self._parts:
            if part.parameters and id(part.parameters[0]) in ON_THE_WAY:
                part.arrive()

    def forget(self) -> None:
        """Forget what is still on its way; after a failed run nothing arrives any more."""
        for part in self._parts:
            part.forget()
        self._parts.clear()

    def begin(self, only: int | None = None) -> None:
        """Send the values of one stage, or of all stages of this rank.  Collective over the stage's replicas."""
        for number, (shared, group) in enumerate(self._shared):
            if only not in (None, shared.stage):
                continue
            if number not in self._dealt:
                self._dealt[number] = list(parts_of(shared.owners, self._tensors, shared.bucket_bytes))
            for names in self._dealt[number]:
                owner = shared.owners[names[0]]
                part = _Part.of([self._tensors[name] for name in names], owner, mine=owner == self._world.rank)
                self._parts.append(part)
                if self._world.overlaps:
                    part.work = dist.broadcast(part.flat, owner, group=group, async_op=True)
                else:
                    self._world.give_group(part.flat, owner, group)
                ON_THE_WAY.update((id(parameter), part.arrive) for parameter in part.parameters)


def parts_of(
    owners: Mapping[str, int], tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[str]]:
    """Deal names to buckets in the order of `owners`, and yield those of each bucket by owner and dtype; large ones go
    alone.  O(parameters)."""
    bucket: dict[object, list[str]] = {}
    filled, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for name, owner in owners.items():
        tensor = tensors[name]
        bucket.setdefault(name if tensor.nbytes >= ALONE_BYTES else (owner, tensor.dtype), []).append(name)
        filled += tensor.nbytes
        if filled >= limit:
            yield from bucket.values()
            bucket.clear()
            filled, limit = 0, bucket_bytes
    yield from bucket.values()
