"""New values of parameters from the replicas that own them, on their way while the run that needs them begins.

Where replicas share the optimizer's state (`ir.shares.owners_of`), each rank has updated only its own parameters.
All values are sent before every run, since nobody can know who changed what.  They go in the order in which the
forward reads them, without waiting where sums may be under way beside messages; who reads one waits for it then
(`awaited`).  Large parameters are received in place; small ones go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopart.ir.program import BUCKET_BYTES, FIRST_BUCKET_BYTES
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World

ALONE_BYTES = 1 << 20
"""Parameters of so many bytes go by themselves, without a copy."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the replicas of a stage share the optimizer's state.  owners: the rank that owns each of its trained
    parameters, in the order in which its forward reads them; empty where every replica keeps all.  bucket_bytes: of
    values that are sent together (`Decision`)."""

    ranks: tuple[int, ...]
    owners: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int = BUCKET_BYTES


@dataclass(eq=False, slots=True)
class _Part:
    """Values of one owner.  flat: side by side, or the one parameter itself.  mine: whether they leave this rank."""

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
        """Wait for the values, and take them."""
        if self.work is not None:
            with waiting(self.owner):
                self.work.wait()
        if not self.mine and self.flat.data_ptr() != self.parameters[0].data_ptr():
            pieces = torch.split(self.flat, [parameter.numel() for parameter in self.parameters])
            with torch.no_grad():
                for parameter, piece in zip(self.parameters, pieces, strict=True):
                    parameter.copy_(piece.view(parameter.shape))
        self.forget()

    def forget(self) -> None:
        """Nobody waits for it any more, and its memory is free before the run is over."""
        for parameter in self.parameters:
            _UNDER_WAY.pop(id(parameter), None)
        self.work, self.flat = None, self.flat.new_empty(0)


_UNDER_WAY: dict[int, _Part] = {}
"""What brings the value of a parameter, by the identity of that."""


def awaited(parameter: torch.Tensor) -> torch.Tensor:
    """The same parameter, once it has its value."""
    part = _UNDER_WAY.get(id(parameter)) if _UNDER_WAY else None
    if part is not None:
        part.arrive()
    return parameter


class SharedValues:
    """The parameters of this rank's stages.  Opening the groups of all stages is collective.

    stages: how the replicas of each stage share.  tensors: what this rank holds, by name.
    """

    def __init__(self, world: World, stages: Sequence[Sharing], tensors: Mapping[str, torch.Tensor]) -> None:
        self._world = world
        self._tensors = tensors
        self._overlaps = world.carrier is None and not world.staged
        self._parts: list[_Part] = []
        self._stages: list[tuple[int, Sharing, dist.ProcessGroup]] = []
        for number, stage in enumerate(stages):
            if stage.owners:
                group = world.group(stage.ranks, purpose="replicas" if self._overlaps else "")
                if world.rank in stage.ranks:
                    self._stages.append((number, stage, group))
        self.owners = {name: owner for _, stage, _ in self._stages for name, owner in stage.owners.items()}

    def keep_own(self) -> None:
        """Let go of gradients of what others own."""
        for name, owner in self.owners.items():
            if owner != self._world.rank:
                self._tensors[name].grad = None

    def gather(self) -> None:
        """Bring all values.  Collective."""
        try:
            self.begin()
            self.arrive()
        finally:
            self.forget()

    def arrive(self) -> None:
        """Wait until all parameters have their values."""
        for part in self._parts:
            if part.parameters and id(part.parameters[0]) in _UNDER_WAY:
                part.arrive()

    def forget(self) -> None:
        """Let go of what is under way: of a run that failed the groups are broken, and nothing comes any more."""
        for part in self._parts:
            part.forget()
        self._parts.clear()

    def begin(self, only: int | None = None) -> None:
        """Send the values of one stage, or of all stages of this rank.  Collective over the stage's replicas.

        From now on every `awaited` parameter has its new value.
        """
        for number, stage, group in self._stages:
            own = {name: owner for name, owner in stage.owners.items() if self.owners[name] == owner}
            for names in parts_of(own, self._tensors, stage.bucket_bytes) if only in (None, number) else ():
                owner = own[names[0]]
                part = _Part.of([self._tensors[name] for name in names], owner, mine=owner == self._world.rank)
                self._parts.append(part)
                if self._overlaps:
                    part.work = dist.broadcast(part.flat, owner, group=group, async_op=True)
                else:
                    self._world.give_group(part.flat, owner, group)
                _UNDER_WAY.update((id(parameter), part) for parameter in part.parameters)


def parts_of(
    owners: Mapping[str, int], tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[str]]:
    """Names that go together: of each bucket, in the order of `owners`, those of one owner and type.  Large ones go
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
