"""Forward and backward of one stage for one micro-batch, or one slice of it.

Between the two it keeps the leaves (received values that need a gradient) and the roots (results whose gradients come
back); autograd holds the rest.  Both are dropped when the backward has run.  A backward of inputs leaves products with
weights for later (`weight_gradients`); all else, such as gradients of norms, biases, embeddings and convolutions, is
computed in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from autopart.ir.actions import Slot
from autopart.ir.shares import Window
from autopart.rng import micro_key
from autopart.runtime.stages.batch_statistics import without_rows
from autopart.runtime.stages.sequence import SlicedMicroBatch
from autopart.runtime.stages.stage_module import Cast, StageSlices, awaited
from autopart.runtime.stages.versions import WeightVersions
from autopart.runtime.stages.weight_gradients import WeightGradient, add_all, deferring

_Tensors = dict[str, torch.Tensor]


class StageRunner:
    """Runs the code of one stage.

    codes: by rows that this rank has of a micro-batch.  tensors: this rank's parameters, buffers and constants by
    name.  grad_inputs: received values whose gradients go back; grad_outputs: results whose gradients come back.
    synced: whether its batch norms take the statistics of all replicas.  steady: buffers that a step updates once
    (`BatchRule.steady`).
    """

    def __init__(
        self,
        codes: Mapping[int, StageSlices],
        tensors: Mapping[str, torch.Tensor],
        grad_inputs: frozenset[str],
        grad_outputs: frozenset[str],
        *,
        synced: bool = False,
        steady: frozenset[str] = frozenset(),
    ) -> None:
        self._codes = codes
        self._tensors = tensors
        self._grad_inputs = grad_inputs
        self._grad_outputs = grad_outputs
        self._synced = synced
        self._steady = steady
        self._kept: dict[Slot, tuple[_Tensors, _Tensors]] = {}  # leaves and roots
        self._deferred: dict[Slot, list[WeightGradient]] = {}
        self._sliced: dict[int, SlicedMicroBatch] = {}
        self._joined: dict[Slot, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._new_buffers: _Tensors = {}
        self._seen_buffers: _Tensors = {}  # by the next micro-batch
        self._last = -1  # number of the last micro-batch in its batch
        self._copies: dict[Cast, torch.Tensor] = {}
        self.versions: WeightVersions | None = None  # of the weights, in asynchronous training
        self.micros = 0  # of a batch, where slots are numbered over several batches

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the model's own tensors that its code uses."""
        codes = [code for _, slices in self._codes.values() for code in slices]
        return tuple(dict.fromkeys(name for code in codes for name in code.held))

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
        """Run the stage on this rank's rows of one slot.  key: (seed, step).  numbers: what `StageModule.numbers` picks
        from.  values: with the first slice also the inputs of the batch, which all slices read.

        The next micro-batch sees the updated buffers, but for steady ones.  The model's buffers change in `finish`,
        since a later backward may have saved the old values.
        """
        prologue, slices = self._codes[window.own]
        code = slices[slot.slice]
        micro = None
        if prologue is not None or len(slices) > 1:
            if not slot.slice:
                full = {name: value for name, value in values.items() if name not in self._grad_inputs}
                self._sliced[slot.micro] = SlicedMicroBatch(slices, self._begin(prologue, full, numbers))
            micro = self._sliced[slot.micro]
            values = {**micro.full, **values}
        leaves = {
            name: values[name].detach().requires_grad_() for name in code.inputs if train and name in self._grad_inputs
        }
        micro_number = slot.micro % self.micros if self.micros else slot.micro
        if self._new_buffers and micro_number <= self._last:  # the next batch
            self._seen_buffers.update(self._new_buffers)
        self._last = micro_number
        tensors = {**self._tensors, **self._seen_buffers} if self._seen_buffers else self._tensors
        copies = self._copies
        if train and self.versions is not None:
            own, copies = self.versions.take(slot)
            tensors = {**tensors, **own}
        weights = [numbers[place] for place in code.numbers]
        past = micro.arguments(slot.slice) if micro is not None else ()
        with torch.set_grad_enabled(train), micro_key(*key, micro_number, window):
            args = code.arguments(tensors, copies)
            args += [leaves.get(name, values[name]) for name in code.inputs]
            results = code.module.forward(*args, *weights, *past)  # a call of a GraphModule takes 10 us more
        del args
        outputs = dict(zip(code.outputs, results, strict=False))
        rest = results[len(code.outputs) :]
        if micro is not None:
            micro.keep(slot.slice, rest)
        elif code.updates:
            new = {name: t.detach() for name, t in zip(code.updates, rest, strict=True)}
            self._new_buffers.update(new)
            self._seen_buffers.update((name, t) for name, t in new.items() if name not in self._steady)
        if train:
            self._kept[slot] = leaves, {name: t for name, t in outputs.items() if name in self._grad_outputs}
        return outputs

    def end_forward(self, slot: Slot) -> None:
        """Forget a slot that has no backward, and its micro-batch with the last slice."""
        self._kept.pop(slot, None)
        micro = self._sliced.get(slot.micro)
        if micro is not None and slot.slice == micro.last:
            del self._sliced[slot.micro]

    def _begin(self, prologue: Any, full: _Tensors, numbers: Sequence[float]) -> _Tensors:
        """Add the results of the prologue to the inputs of a micro-batch."""
        if prologue is not None:
            with torch.no_grad():
                args = [*prologue.arguments(self._tensors), *(full[name] for name in prologue.inputs)]
                made = prologue.module(*args, *(numbers[place] for place in prologue.numbers))
            full.update(zip(prologue.outputs, made, strict=True))
        return full

    def backward(self, slot: Slot, grads: Mapping[str, torch.Tensor], *, whole: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients of the received values, given those of the results.  Parameters accumulate their own.

        A value whose path to the loss has no derivative gets zeros, since the receiver waits for it.  whole: whether
        the gradients of all parameters are complete afterwards; else `backward_of_weights` completes them.
        """
        leaves, made = self._kept.pop(slot)
        roots = [(t, grads[name]) for name, t in made.items() if name in grads and t.requires_grad]
        micro = self._sliced.get(slot.micro)
        if micro is not None:
            roots += micro.roots(slot.slice)
        later: list[WeightGradient] = []
        collected = self.versions.collecting(slot) if self.versions is not None else nullcontext()
        with collected, nullcontext() if whole else deferring(later):
            if roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        if later:
            self._deferred[slot] = later
        if micro is not None:
            micro.collect(slot.slice)
            if not slot.slice:  # backwards run from the last slice to the first
                del self._sliced[slot.micro]
        return {n: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for n, leaf in leaves.items()}

    def deferred(self, slot: Slot) -> list[torch.Tensor]:
        """Return the parameters whose gradients `backward_of_weights` will add to."""
        return [gradient.parameter for gradient in self._deferred.get(slot, ())]

    def backward_of_weights(self, slot: Slot, complete: Callable[[torch.Tensor], None] | None = None) -> None:
        """Compute what the backward of inputs of this slot has left.  complete: called with each parameter that it adds
        to when nothing is left for it."""
        add_all(self._deferred.pop(slot, []), complete)

    def join_forward(
        self, slot: Slot, specs: Mapping[Any, Mapping[str, torch.Tensor]], key: tuple[int, int], device: torch.device
    ) -> None:
        """Take part in the sums of batch statistics without rows: the code runs on ones and contributes nothing."""
        if not self._synced:
            return
        rows = max(self._codes)
        (code,) = self._codes[rows][1]
        given = {name: _anything(specs[rows][name], device) for name in code.inputs}
        leaves = {name: tensor.requires_grad_() for name, tensor in given.items() if name in self._grad_inputs}
        with without_rows(), micro_key(*key, slot.micro):
            args = [_stand_in(arg) for arg in code.arguments(self._tensors, self._copies)]
            trained = [arg for arg in args if arg.requires_grad]
            results = code.module(*args, *given.values(), *(1.0 for _ in code.numbers))
        outputs = dict(zip(code.outputs, results, strict=False))
        roots = {n: t for n, t in outputs.items() if n in self._grad_outputs and t.requires_grad}
        self._joined[slot] = list(roots.values()), [*leaves.values(), *trained]

    def join_backward(self, slot: Slot) -> None:
        """Take part in the sums of the backward after `join_forward`; the gradients are dropped."""
        roots, inputs = self._joined.pop(slot, ([], []))
        if roots and inputs:
            zeros = [torch.zeros_like(root) for root in roots]
            with without_rows():  # activation checkpointing runs forwards again
                torch.autograd.grad(roots, inputs, zeros, allow_unused=True)

    def new_buffers(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the values that these buffers take in `finish`, to be written to; uninitialized without rows."""
        for name in names:
            if name not in self._new_buffers:
                self._new_buffers[name] = torch.empty_like(self._tensors[name])
        return [self._new_buffers[name] for name in names]

    def finish(self) -> None:
        """Write the new values of the buffers at the end of a step, in place."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._new_buffers.items():
            by_dtype.setdefault(tensor.dtype, []).append(name)
        with torch.no_grad():
            for names in by_dtype.values():  # one kernel for all of a dtype
                torch._foreach_copy_([self._tensors[n] for n in names], [self._new_buffers[n] for n in names])
        self.clear()

    def clear(self) -> None:
        """Forget the step; buffers keep the values from before it."""
        self._kept.clear()
        self._deferred.clear()
        self._sliced.clear()
        self._joined.clear()
        self._new_buffers.clear()
        self._seen_buffers.clear()
        self._last = -1
        self._copies.clear()


def _stand_in(arg: torch.Tensor) -> torch.Tensor:
    """Return a leaf over the memory of a trained tensor, whose gradient is dropped; any other tensor as it is."""
    return awaited(arg).detach().requires_grad_() if arg.requires_grad else arg


def _anything(spec: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor whose numbers do not count: ones, which most ops accept, and 0 as a class or index."""
    return torch.full_like(spec, 1 if spec.is_floating_point() else 0, device=device)
