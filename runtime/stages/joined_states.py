"""What the slices of a micro-batch look back at as one tensor (K and V), kept once: each slice writes its own tokens
behind those of the slices before, and reads all of them where they lie.

Joined anew for every slice, K and V of s slices would take (s + 1) / 2 times the memory of the whole sequence, and the
time to copy it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Joined:
    """A state that slices share, as one of them reads it.

    shape: of the whole sequence; axis: with the tokens.  Along it the slice reads from entry `low` on; [start, end) are
    its own.
    """

    state: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int
    low: int
    start: int
    end: int

    def buffer(self) -> torch.Tensor:
        """Room for all tokens, which nothing is written to yet."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def before(self, buffer: torch.Tensor) -> torch.Tensor:
        """What the slice reads of those before it."""
        return _same_memory(buffer, self.axis, self.low, self.start)

    def grown(self, buffer: torch.Tensor, own: torch.Tensor, before: torch.Tensor | None) -> Any:
        """(what the slice adds, all that it reads), both in the buffer.

        own: of the slice, which is written.  before: as `before` gives it, with a graph or without; None where nothing
        is read of it.
        """
        return _Grown.apply(self, buffer, own, before)  # type: ignore[no-untyped-call]


class _Grown(torch.autograd.Function):
    """Views of one buffer, as tensors of their own: what is written later lies beside what they hold, so autograd need
    not hold it against them."""

    @staticmethod
    def forward(
        ctx: Any, place: Joined, buffer: torch.Tensor, own: torch.Tensor, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.place, ctx.looks_back = place, before is not None
        ctx.set_materialize_grads(False)
        block = _same_memory(buffer, place.axis, place.start, place.end)
        block.copy_(own)
        return block, _same_memory(buffer, place.axis, place.low, place.end)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_block: torch.Tensor | None, of_all: torch.Tensor | None
    ) -> tuple[None, None, torch.Tensor | None, torch.Tensor | None]:
        place: Joined = ctx.place
        if of_all is None:
            return None, None, of_block, None
        behind = place.start - place.low
        own = of_all.narrow(place.axis, behind, place.end - place.start)
        before = of_all.narrow(place.axis, 0, behind) if ctx.looks_back else None
        return None, None, own if of_block is None else own + of_block, before


def _same_memory(buffer: torch.Tensor, axis: int, low: int, high: int) -> torch.Tensor:
    """Entries [low, high) as a tensor that is no view, with a version of its own."""
    part = buffer.detach().narrow(axis, low, high - low)
    return buffer.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
