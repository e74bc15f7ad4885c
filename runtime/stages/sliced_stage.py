"""Forward and backward of one stage for the slices of a micro-batch's sequences, in turn.

What later slices look back at (K and V, running sums) is kept between them: a slice gets it as leaves, and what
gradient they collect over all later slices goes into the backward of the slice that made it, which comes after theirs.
Nothing of this leaves the stage.  What they look back at as one tensor lies in one, which they fill in turn, and so do
its gradients.  It is dropped with the backward of the first slice, the last of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopart.ir.program import Slot
from autopart.ir.shares import Window
from autopart.rng import micro_key
from autopart.runtime.stages.joined_states import Joined
from autopart.runtime.stages.slice_module import SlicedStage, SliceModule
from autopart.runtime.stages.stage import StageRunner

State = tuple[str, int]
"""The part of a value that one slice made: its name and the number of the slice."""


@dataclass
class _Micro:
    """A micro-batch under way.

    full: inputs, and what the prologue made of them.  states: what slices left behind; of those that lie in one tensor
    (shared) where they lie there.  owed, owed_shared: gradients of these, of so many later slices as are done.
    leaves, before, roots: by slice: received values and states, what lies in shared tensors before it, and results.
    """

    slices: tuple[SliceModule, ...]
    full: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[State, torch.Tensor] = field(default_factory=dict)
    owed: dict[State, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    owed_shared: dict[str, torch.Tensor] = field(default_factory=dict)
    leaves: dict[int, dict[str | State, torch.Tensor]] = field(default_factory=dict)
    before: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    roots: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class SlicedRunner(StageRunner):
    """Plays the code of one stage, slice by slice.

    sliced: by rows that this rank has of a micro-batch.  The rest is that of `StageRunner`.
    """

    def __init__(
        self,
        sliced: Mapping[int, SlicedStage],
        tensors: Mapping[str, torch.Tensor],
        grad_inputs: frozenset[str],
        grad_outputs: frozenset[str],
    ) -> None:
        super().__init__({}, tensors, grad_inputs, grad_outputs)
        self._sliced = sliced
        self._micros: dict[tuple[int, int], _Micro] = {}

    @property
    def in_flight(self) -> int:
        """Slots whose backward is still to come."""
        return sum(len(micro.leaves) for micro in self._micros.values())

    def makes(self, value: str) -> bool:
        """Whether this stage computes a value that leaves it."""
        return any(value in part.code.outputs for stage in self._sliced.values() for part in stage.slices)

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
        """Run the stage on one slice.  values: with the first slice also the inputs of the batch that the stage reads.
        numbers: of these rows, the same for all slices."""
        assert train
        stage = self._sliced[window.own]
        part = stage.slices[slot.slice]
        micro = self._micros.setdefault((slot.stage, slot.micro), _Micro(stage.slices))
        if not slot.slice:
            self._begin(stage, micro, values, numbers)
        leaves: dict[str | State, torch.Tensor] = {
            name: values[name].detach().requires_grad_() for name in values if name in self._grad_inputs
        }
        for state in part.past:
            block = micro.states[state]
            leaves[state] = block.detach().requires_grad_(block.requires_grad)
        before = self._before(micro, part, slot.slice)
        shared = [t for at in part.joined for t in (micro.shared[at.state], before.get(at.state)) if t is not None]
        with torch.enable_grad(), micro_key(*key, slot.micro, window):
            args = part.code.arguments(self._tensors, self._casts)
            args += [
                leaves[n] if n in leaves else values[n] if n in values else micro.full[n] for n in part.code.inputs
            ]
            weights = [numbers[place] for place in part.code.numbers]
            results = part.code.module(*args, *weights, *(leaves[state] for state in part.past), *shared)
        outputs = dict(zip(part.code.outputs, results, strict=False))
        left = results[len(outputs) :]
        states = (*part.states, *(at.state for at in part.joined)) if left else ()
        micro.states.update({(name, slot.slice): made for name, made in zip(states, left, strict=True)})
        micro.leaves[slot.slice], micro.before[slot.slice] = leaves, before
        micro.roots[slot.slice] = {name: t for name, t in outputs.items() if name in self._grad_outputs}
        return outputs

    @staticmethod
    def _before(micro: _Micro, part: SliceModule, number: int) -> dict[str, torch.Tensor]:
        """What a slice reads of those before it of states that they share, as leaves."""
        found = {}
        for at in part.joined:
            if not number:
                micro.shared[at.state] = at.buffer()
            if at.start > at.low:
                trained = any(micro.states[at.state, one].requires_grad for one in range(number))
                found[at.state] = at.before(micro.shared[at.state]).requires_grad_(trained)
        return found

    def _begin(
        self, stage: SlicedStage, micro: _Micro, values: Mapping[str, torch.Tensor], numbers: Sequence[float]
    ) -> None:
        """Keep the inputs for all slices, and compute at full length what follows from them alone."""
        micro.full.update((name, value) for name, value in values.items() if name not in self._grad_inputs)
        code = stage.prologue
        if code is not None:
            with torch.no_grad():
                own = [*code.arguments(self._tensors), *(micro.full[name] for name in code.inputs)]
                made = code.module(*own, *(numbers[place] for place in code.numbers))
            micro.full.update(zip(code.outputs, made, strict=True))

    def backward(self, slot: Slot, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of what the slice received.  Parameters, and states of the slices before, collect theirs."""
        micro = self._micros[slot.stage, slot.micro]
        leaves, made = micro.leaves.pop(slot.slice), micro.roots.pop(slot.slice)
        before, part = micro.before.pop(slot.slice), micro.slices[slot.slice]
        owned = {at.state: at for at in part.joined}
        roots = [(t, grads[name]) for name, t in made.items() if name in grads and t.requires_grad]
        for state in [state for state in micro.states if state[1] == slot.slice]:
            block, owed = micro.states.pop(state), micro.owed.pop(state, None)
            if state[0] in micro.owed_shared and state[0] in owned:
                at = owned[state[0]]
                owed = micro.owed_shared[at.state].narrow(at.axis, at.start, at.end - at.start)
            if owed is not None and block.requires_grad:
                roots.append((block, owed.to(block.dtype)))
        if roots:
            torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        back = {}
        for name, leaf in leaves.items():
            if isinstance(name, str):
                back[name] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            elif leaf.grad is not None:
                self._owe(micro, name, leaf.grad)
        for name, leaf in before.items():
            if leaf.grad is not None:
                self._owe_shared(micro, owned[name], leaf.grad)
        if not slot.slice:
            del self._micros[slot.stage, slot.micro]
        return back

    @staticmethod
    def _owe(micro: _Micro, state: State, grad: torch.Tensor) -> None:
        """In fp32 at least: there are as many addends as slices."""
        wide = grad if grad.element_size() >= 4 else grad.float()
        micro.owed[state] = micro.owed[state] + wide if state in micro.owed else wide

    @staticmethod
    def _owe_shared(micro: _Micro, at: Joined, grad: torch.Tensor) -> None:
        """The same of states that lie in one tensor, in one tensor."""
        if at.state not in micro.owed_shared:
            wide = grad.dtype if grad.element_size() >= 4 else torch.float32
            micro.owed_shared[at.state] = torch.zeros(at.shape, dtype=wide, device=grad.device)
        micro.owed_shared[at.state].narrow(at.axis, at.low, at.start - at.low).add_(grad)

    def clear(self) -> None:
        """Forget every slot, after a step that failed."""
        super().clear()
        self._micros.clear()
