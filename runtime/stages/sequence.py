"""What the slices of one micro-batch keep for each other between their forwards and backwards.

A slice gets what earlier slices left (K and V, running sums) as leaves.  The gradients that these leaves collect over
all later slices go into the backward of the slice that made them, which runs after the backwards of those slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.runtime.stages.stage_module import StageModule

_Block = tuple[str, int]
"""The part of a state that one slice made: the state's name and the number of the slice."""


class SlicedMicroBatch:
    """States of a micro-batch under way.  full: inputs, and results of the prologue, for the whole sequence."""

    def __init__(self, slices: Sequence[StageModule], full: Mapping[str, torch.Tensor]) -> None:
        self.full = full
        self._slices = slices
        self._blocks: dict[_Block, torch.Tensor] = {}
        self._block_grads: dict[_Block, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_grads: dict[str, torch.Tensor] = {}
        self._past: dict[int, dict[_Block, torch.Tensor]] = {}
        self._prefixes: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def last(self) -> int:
        """Number of the last slice."""
        return len(self._slices) - 1

    def arguments(self, number: int) -> list[torch.Tensor]:
        """Return what the code of a slice reads of earlier slices."""
        code = self._slices[number]
        past = {block: self._blocks[block].detach() for block in code.past}
        for block, leaf in past.items():
            leaf.requires_grad_(self._blocks[block].requires_grad)
        found, prefixes = list(past.values()), {}
        for place in code.buffers:
            if not number:
                self._buffers[place.state] = place.allocate()
            buffer = self._buffers[place.state]
            found.append(buffer)
            if place.start > place.low:
                trained = any(self._blocks[place.state, one].requires_grad for one in range(number))
                prefix = prefixes[place.state] = place.prefix(buffer).requires_grad_(trained)
                found.append(prefix)
        self._past[number], self._prefixes[number] = past, prefixes
        return found

    def keep(self, number: int, results: Sequence[torch.Tensor]) -> None:
        """Keep what a slice returned for later ones; the last slice returns nothing."""
        code = self._slices[number]
        names = (*code.states, *(place.state for place in code.buffers)) if results else ()
        self._blocks.update({(name, number): made for name, made in zip(names, results, strict=True)})

    def roots(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the blocks that a slice made, each with the gradient that later slices collected for it."""
        places = {place.state: place for place in self._slices[number].buffers}
        found = []
        for block in [block for block in self._blocks if block[1] == number]:
            made, grad = self._blocks.pop(block), self._block_grads.pop(block, None)
            place = places.get(block[0])
            if place is not None and place.state in self._buffer_grads:
                grad = self._buffer_grads[place.state].narrow(place.axis, place.start, place.end - place.start)
            if grad is not None and made.requires_grad:
                found.append((made, grad.to(made.dtype)))
        return found

    def collect(self, number: int) -> None:
        """Add the gradients of what a slice read of earlier ones to those that wait for the earlier backwards.

        They are summed in fp32 at least, since there are as many addends as slices."""
        for block, leaf in self._past.pop(number).items():
            if leaf.grad is not None:
                wide = leaf.grad.to(_wide(leaf.grad))
                self._block_grads[block] = self._block_grads[block] + wide if block in self._block_grads else wide
        prefixes = self._prefixes.pop(number)
        for place in self._slices[number].buffers:
            grad = prefixes[place.state].grad if place.state in prefixes else None
            if grad is None:
                continue
            if place.state not in self._buffer_grads:
                self._buffer_grads[place.state] = torch.zeros(place.shape, dtype=_wide(grad), device=grad.device)
            self._buffer_grads[place.state].narrow(place.axis, place.low, place.start - place.low).add_(grad)


def _wide(grad: torch.Tensor) -> torch.dtype:
    return grad.dtype if grad.element_size() >= 4 else torch.float32
