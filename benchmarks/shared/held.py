"""The bytes that a rank keeps for the backward passes of a step, at its fullest time."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch

import autopart
from autopart.ir.actions import Slot
from autopart.runtime.stages import recomputation
from autopart.runtime.stages.stage import StageRunner


class Held:
    """Bytes of storage that autograd holds, without parameters, now and at most."""

    def __init__(self, parameters: Any) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._count: dict[int, int] = {}
        self.now = self.most = 0

    def hooks(self) -> Any:
        """Return a context in which tensors saved for the backward pass are counted until they are released."""
        return torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t, self), lambda kept: kept.tensor)

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count a saved tensor of this storage."""
        if storage.data_ptr() in self._own:
            return
        self._count[storage.data_ptr()] = self._count.get(storage.data_ptr(), 0) + 1
        if self._count[storage.data_ptr()] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)

    def give(self, storage: torch.UntypedStorage) -> None:
        """Count a released tensor of this storage."""
        if storage.data_ptr() in self._own:
            return
        self._count[storage.data_ptr()] -= 1
        if not self._count[storage.data_ptr()]:
            self.now -= storage.nbytes()


class _Kept:
    def __init__(self, tensor: torch.Tensor, held: Held) -> None:
        self.tensor, self._held, self._storage = tensor.detach(), held, tensor.untyped_storage()
        held.take(self._storage)

    def __del__(self) -> None:
        self._held.give(self._storage)


def held_bytes(pipe: autopart.Pipe, batch: Any) -> int:
    """Return the most bytes that this rank keeps for the backward pass in one step: saved by autograd or received."""
    held = Held(pipe.session.tensors.held.values())  # with ZeRO, `parameters()` are those of this rank's optimizer
    plain, group = StageRunner.forward, recomputation._Call.__init__

    def watched(runner: StageRunner, slot: Slot, *args: Any, **kwargs: Any) -> Any:
        outputs = plain(runner, slot, *args, **kwargs)
        for leaf in runner._kept[slot][0].values():
            held.take(leaf.untyped_storage())
            weakref.finalize(leaf, held.give, leaf.untyped_storage())
        return outputs

    def kept(call: Any, body: Any, inputs: tuple[Any, ...]) -> None:
        """Count what a recomputed group keeps, which autograd does not know: its inputs, as long as the group waits."""
        group(call, body, inputs)
        call.counted = [_Kept(each, held) for each in inputs if isinstance(each, torch.Tensor)]

    groups = mock.patch.object(recomputation._Call, "__init__", kept)
    with held.hooks(), groups, mock.patch.object(StageRunner, "forward", watched):
        pipe.step(batch)
    return held.most
