"""Forward and backward of one stage for one micro-batch (or slice of it).

Between the two it keeps the leaves (received values that need a gradient) and the roots (results a gradient comes
back for); autograd holds the rest.  Both are dropped as soon as the backward has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.ir.program import Slot
from autopart.ir.shares import Window
from autopart.rng import micro_key
from autopart.runtime.messages.transport import Spec
from autopart.runtime.stages.batch_statistics import BatchStatistics
from autopart.runtime.stages.casts import StepCasts
from autopart.runtime.stages.stage_module import StageModule


@dataclass(frozen=True)
class _Kept:
    leaves: dict[str, torch.Tensor]
    roots: dict[str, torch.Tensor]
    stash: dict[torch.Tensor, torch.Tensor]


class StageRunner:
    """Plays the code of one stage.

    codes: by rows that this rank has of a micro-batch.  tensors: this rank's parameters, buffers and constants by
    name.  grad_inputs: values received whose gradients go back; grad_outputs: results whose gradients come back.
    statistics: what its batch norms sum with other replicas, None where they have their own.  update: of an
    asynchronous schedule, called with the stage's parameters after each backward; each micro-batch then keeps a copy of
    the weights that its forward used, for its backward (weight stashing; PipeDream, SOSP 2019, section 3.3).
    """

    def __init__(
        self,
        codes: Mapping[int, StageModule],
        tensors: Mapping[str, torch.Tensor],
        grad_inputs: frozenset[str],
        grad_outputs: frozenset[str],
        statistics: BatchStatistics | None = None,
        update: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._codes = codes
        self._tensors = tensors
        self._grad_inputs = grad_inputs
        self._grad_outputs = grad_outputs
        self._statistics = statistics
        self._update = update
        self._kept: dict[Slot, _Kept] = {}
        self._joined: dict[Slot, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._fresh: dict[str, torch.Tensor] = {}  # new values of buffers in this step
        self._casts = StepCasts()

    @property
    def in_flight(self) -> int:
        """Slots whose backward is still to come."""
        return len(self._kept)

    def code(self, rows: int) -> StageModule:
        """The code for a micro-batch of `rows` rows."""
        return self._codes[rows]

    def makes(self, value: str) -> bool:
        """Whether this stage computes a value that leaves it."""
        return any(value in code.outputs for code in self._codes.values())

    def forward(
        self,
        slot: Slot,
        window: Window,
        values: Mapping[str, torch.Tensor],
        key: tuple[int, int],
        *,
        train: bool,
        numbers: Sequence[float] = (),
    ) -> dict[str, torch.Tensor]:
        """Run the stage on the rows of one slot that this rank has; `key` is (seed, step); numbers: of these rows.

        The next micro-batch sees the updated buffers; the buffers themselves change at `finish`, because a backward
        still to come may have kept the old ones.
        """
        code = self._codes[window.own]
        leaves = {
            name: values[name].detach().requires_grad_() for name in code.inputs if train and name in self._grad_inputs
        }
        tensors, stash, casts = {**self._tensors, **self._fresh}, self._stash(code) if train else {}, self._casts
        if stash:
            tensors, casts = {name: stash.get(tensor, tensor) for name, tensor in tensors.items()}, StepCasts()
        with torch.set_grad_enabled(train):
            args = code.arguments(tensors, casts)
        args += [leaves.get(name, values[name]) for name in code.inputs]
        numbered = [numbers[place] for place in code.numbers]
        with torch.set_grad_enabled(train), micro_key(*key, slot.micro, window):
            results = code.module(*args, *numbered)
        del args
        outputs = dict(zip(code.outputs, results, strict=False))
        self._fresh.update((n, t.detach()) for n, t in zip(code.updates, results[len(code.outputs) :], strict=True))
        if train:
            self._kept[slot] = _Kept(leaves, {n: t for n, t in outputs.items() if n in self._grad_outputs}, stash)
        return outputs

    def _stash(self, code: StageModule) -> dict[torch.Tensor, torch.Tensor]:
        """Copy the trainable parameters of an asynchronous stage as they are now."""
        used = dict.fromkeys(self._tensors[name] for name in code.held) if self._update else {}
        return {tensor: tensor.detach().clone().requires_grad_() for tensor in used if tensor.requires_grad}

    def join_forward(
        self, slot: Slot, specs: Mapping[Any, Mapping[str, Spec]], key: tuple[int, int], device: torch.device
    ) -> None:
        """Of a slot of which this rank has no rows: join what the code of others sums inside, with nothing."""
        if self._statistics is None:
            return
        rows = max(self._codes)
        code = self._codes[rows]
        given = {name: _anything(specs[rows][name], device) for name in code.inputs}
        leaves = {name: tensor.requires_grad_() for name, tensor in given.items() if name in self._grad_inputs}
        with self._statistics.absent(), micro_key(*key, slot.micro):
            args = code.arguments(self._tensors, self._casts)
            trained = [arg for arg in args if arg.requires_grad]
            results = code.module(*args, *given.values(), *(1.0 for _ in code.numbers))
        outputs = dict(zip(code.outputs, results, strict=False))
        roots = {n: t for n, t in outputs.items() if n in self._grad_outputs and t.requires_grad}
        self._joined[slot] = list(roots.values()), [*leaves.values(), *trained]

    def join_backward(self, slot: Slot) -> None:
        """The same of its backward; no gradient comes of it."""
        roots, inputs = self._joined.pop(slot, ([], []))
        if self._statistics is None or not roots or not inputs:
            return
        with self._statistics.absent():
            zeros = [torch.zeros_like(root) for root in roots]
            torch.autograd.grad(roots, inputs, zeros, allow_unused=True)

    def fresh_buffers(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The values that these buffers take at `finish`, to be written to; where this rank had no rows, room for
        them."""
        for name in names:
            if name not in self._fresh:
                self._fresh[name] = torch.empty_like(self._tensors[name])
        return [self._fresh[name] for name in names]

    def finish(self) -> None:
        """End of a step: the buffers take their new values, in place."""
        with torch.no_grad():
            for name, tensor in self._fresh.items():
                self._tensors[name].copy_(tensor)
        self._fresh.clear()
        self._casts.clear()

    def backward(self, slot: Slot, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of the received values, from the gradients of the results.  Parameters accumulate theirs.

        A value whose path to the loss has no derivative gets zeros: the receiver waits for it.
        """
        kept = self._kept.pop(slot)
        roots = [(t, grads[name]) for name, t in kept.roots.items() if name in grads and t.requires_grad]
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        if self._update is not None:
            for parameter, version in kept.stash.items():
                parameter.grad = version.grad
            self._update({name: t for name, t in self._tensors.items() if t in kept.stash})
            for parameter in kept.stash:
                parameter.grad = None
        return {n: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for n, leaf in kept.leaves.items()}

    def clear(self) -> None:
        """Forget every slot, after a step that failed: buffers stay as they were before it."""
        self._kept.clear()
        self._joined.clear()
        self._fresh.clear()
        self._casts.clear()


def _anything(spec: Spec, device: torch.device) -> torch.Tensor:
    """A tensor of which no number counts: ones, which most ops take without harm, and the first class or index."""
    return torch.full(spec.shape, 1 if spec.dtype.is_floating_point else 0, dtype=spec.dtype, device=device)
