"""Versions of a stage's weights: each batch in flight keeps the weights of its forward for its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from autopart.ir.actions import Slot
from autopart.runtime.stages.stage_module import Cast

_Tensors = dict[str, torch.Tensor]


class WeightVersions:
    """The versions of the trainable tensors of one stage, by number of updates: each is a set of leaves.

    The newest version shares the memory of the parameters.  When it is still needed after an update, the parameters
    move to new memory first: the optimizer works in place, and would overwrite what backwards have saved.  So a stage
    holds exactly the versions that it needs.

    parameters: by name.  version_of: from a slot to the number of the version that it uses.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], version_of: Callable[[Slot], int]) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._once = list({id(p): (name, p) for name, p in self._parameters.items()}.values())
        self._version_of = version_of
        self._leaves: dict[int, _Tensors] = {}
        self._casts: dict[int, dict[Cast, torch.Tensor]] = {}
        self._used: dict[Slot, int] = {}  # versions by slot in flight
        self.newest = 0
        self.most_held = 1

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The trainable tensors, each once."""
        return [p for _, p in self._once]

    def take(self, slot: Slot) -> tuple[_Tensors, dict[Cast, torch.Tensor]]:
        """Return the weights that the forward of a slot uses, and their casts so far."""
        number = self._used[slot] = self._version_of(slot)
        if number not in self._leaves:
            assert number == self.newest, f"version {number} is gone"
            self._leaves[number] = self._leaves_now()
        return self._leaves[number], self._casts.setdefault(number, {})

    def _leaves_now(self) -> _Tensors:
        """Return leaves over the memory of the parameters, with version counters of their own (`.data`): the optimizer
        may then write to the parameters after these have moved."""
        once = {id(p): p.data.requires_grad_() for _, p in self._once}
        return {name: once[id(p)] for name, p in self._parameters.items()}

    @contextmanager
    def collecting(self, slot: Slot) -> Iterator[None]:
        """Let the backward of a slot add its gradients to those of the parameters."""
        leaves = self._leaves[self._used.pop(slot)]
        pairs = [(p, leaves[name]) for name, p in self._once]
        for parameter, leaf in pairs:
            leaf.grad = parameter.grad
        try:
            yield
        finally:
            for parameter, leaf in pairs:
                parameter.grad, leaf.grad = leaf.grad, None

    def update(self, change: Callable[[], None], needed: int) -> None:
        """Make a new version.  change: writes to the parameters.  needed: the oldest version that a later forward
        uses."""
        uses = Counter(self._used.values())
        gone = [number for number in self._leaves if number < needed and not uses[number]]
        freed = [self._drop(number) for number in gone if number < self.newest]
        if uses[self.newest] or needed <= self.newest:
            if self.newest not in self._leaves:
                self._leaves[self.newest] = self._leaves_now()
            self._move(freed[0] if freed else {})
        change()
        self.newest += 1
        if self.newest - 1 in gone:  # shares the memory of the parameters
            self._drop(self.newest - 1)
        self.most_held = max(self.most_held, len(self._leaves.keys() | {self.newest}))

    def _drop(self, number: int) -> _Tensors:
        """Forget a version, and return its tensors."""
        self._casts.pop(number, None)
        return self._leaves.pop(number)

    def _move(self, freed: _Tensors) -> None:
        """Give the parameters the same values in other memory: that of a version which is gone, or new memory, which
        the system has to clear first."""
        targets = [freed[name].data if freed else torch.empty_like(p.data) for name, p in self._once]
        torch._foreach_copy_(targets, [p.data for _, p in self._once])
        for (_, parameter), target in zip(self._once, targets, strict=True):
            parameter.data = target

    def restart(self) -> None:
        """Forget all versions but the newest, which counts from 0 again.  Nothing may be in flight."""
        self._leaves.clear()
        self._casts.clear()
        self._used.clear()
        self.newest = 0
