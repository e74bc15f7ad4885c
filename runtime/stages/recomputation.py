"""A group of ops that runs again in the backward, so that only its inputs are kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 3.

As in torch.utils.checkpoint (its kind that is not reentrant), the forward builds the graph of autograd, in which
numbers stand for what it would save; the first that a backward asks for lets the group run again until all of them are
made.  The graph is that of a group that is kept, so gradients, hooks and products that wait are too.  A number costs a
call from autograd into Python; torch's code, which serves graphs that run backward twice or in part, takes several
times as long.  And a product that saves nothing but its operands does not run again at a group's end, also where Python
code computes it (`ends_with`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from autopart.rng import current_key, micro_key


class RecomputedGroup(nn.Module):
    """Runs `body` in the forward, and again in the backward to compute what autograd needs; only inputs are kept."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        """Return what `body` returns.  Random ops draw the same numbers both times: they use the key of the forward,
        since the backward may run in a thread of autograd or while another micro-batch's key is set."""
        if not torch.is_grad_enabled():
            return self.body.forward(*inputs)
        call = _Call(self.body, inputs)
        with saved_tensors_hooks(call.number, call.made):
            return self.body.forward(*inputs)


class _Enough(Exception):
    """Ends a group that runs again: everything that is needed is made."""


class _Call:
    """One call of a group: its inputs, and when it has run again, the tensors that autograd saves in it, in order."""

    def __init__(self, body: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
        self._body, self._inputs, self._key = body, inputs, current_key()
        self._versions = _versions(inputs)
        self._count = 0
        self._made: list[torch.Tensor | None] | None = None

    def number(self, tensor: torch.Tensor) -> int:
        """Return what autograd keeps instead of a tensor."""
        self._count += 1
        return self._count - 1

    def made(self, number: int) -> torch.Tensor:
        """Return the tensor of a number, once.  It is freed when autograd is done with it."""
        made = self._run_again() if self._made is None else self._made
        found, made[number] = made[number], None
        if found is None:
            raise RuntimeError("a backward reads a tensor of a recomputed group twice, and it was freed")
        return found

    def _run_again(self) -> list[torch.Tensor | None]:
        inputs, self._inputs = self._inputs, ()
        if _versions(inputs) != self._versions:
            raise RuntimeError("an input of a recomputed group was changed in place before its backward")
        made = self._made = []
        token = _running.set(self)
        try:
            with saved_tensors_hooks(self._save, _unused), torch.enable_grad(), micro_key(*self._key):
                self._body.forward(*inputs)
        except _Enough:
            pass
        finally:
            _running.reset(token)
        if len(made) != self._count:
            raise RuntimeError(f"a recomputed group saved {self._count} tensors, and {len(made)} when it ran again")
        return made

    def _save(self, tensor: torch.Tensor) -> None:
        assert self._made is not None
        self._made.append(tensor.detach() if tensor.requires_grad else tensor)  # else it would hold the second graph
        if len(self._made) == self._count:
            raise _Enough

    def end_with(self, tensors: list[torch.Tensor]) -> None:
        """Save these, if they are the last, and end."""
        assert self._made is not None
        if len(self._made) + len(tensors) == self._count:
            for tensor in tensors:
                self._save(tensor)


_running: ContextVar[_Call | None] = ContextVar("autopart_recomputation", default=None)
"""The call that runs again in this thread."""


def ends_with(*saved: torch.Tensor | None) -> None:
    """End the group that runs again, if a function of autograd written in Python, which calls this before it computes,
    saves the last that it is for: autograd takes what these save only when they have computed."""
    call = _running.get()
    if call is not None:
        call.end_with([tensor for tensor in saved if tensor is not None])


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    """Return how often each tensor was written to."""
    return [each._version for each in inputs if isinstance(each, torch.Tensor)]


def _unused(nothing: None) -> torch.Tensor:
    raise AssertionError("the graph of a group that ran again has no backward")
