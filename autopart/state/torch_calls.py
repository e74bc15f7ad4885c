"""Calls of torch that are noticed while a pipe is open, since a pipe has another call in their place.

They act on a module, on gradients or on an optimizer without asking the pipe, so torch's functions are wrapped from the
first pipe that is open to the last one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopart.ir.errors import UsageError


@dataclass(eq=False)
class Open:
    """An open pipe.  model: that was compiled.  held: returns what this rank holds.  parted: returns whether ranks hold
    parts of the model.  stale: returns whether steps were taken since the model got the values of all ranks."""

    model: nn.Module
    held: Callable[[], Iterable[torch.Tensor]]
    parted: Callable[[], bool]
    stale: Callable[[], bool]
    warned: set[str] = field(default_factory=set)

    def warn(self, what: str, instead: str, frames: int) -> None:
        """Warn once, on the line that called torch: this number of frames above the wrapped function."""
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(f"{what}: {instead}", stacklevel=3 + frames)


_OPEN: list[Open] = []


def _clipping(original: Callable[..., Any], tensors: Any, *more: Any, **options: Any) -> Any:
    """Look at the gradients whose norm clip_grad_norm_ takes."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for pipe in _OPEN:
        if pipe.parted() and {id(t.grad) for t in pipe.held()}.intersection(map(id, tensors)):
            pipe.warn(
                "torch.nn.utils.clip_grad_norm_ clips by the norm of what this rank holds alone",
                "use pipe.clip_grad_norm_(max_norm), which has the norm over all ranks",
                frames=3,
            )
    return original(tensors, *more, **options)


def _reading(original: Callable[..., Any], module: nn.Module, *more: Any, **options: Any) -> Any:
    """Look at the module whose state is read."""
    for pipe in _OPEN:
        if module is pipe.model and pipe.parted() and pipe.stale():
            pipe.warn(
                "model.state_dict() of a model that a pipe trains has old values where other ranks train",
                "use pipe.state_dict(), or call pipe.sync_model() before; pipe.close() does that too",
                frames=1,
            )
    return original(module, *more, **options)


def _scaling(original: Callable[..., Any], scaler: Any, optimizer: Any, *more: Any, **options: Any) -> Any:
    """Look at the optimizer whose gradients a scaler would divide once more."""
    driven = {id(one) for group in optimizer.param_groups for one in group["params"]} if scaler.is_enabled() else set()
    if any(id(one) in driven for pipe in _OPEN for one in pipe.held()):
        raise UsageError(
            "torch.amp.GradScaler is used on the gradients of a pipe",
            why="it would divide them by a scale that they do not have: pipe.step has scaled the loss and divided the "
            "gradients where the precision needs it",
            fix='leave the scaler out: pass precision="fp16" to compile, and call `if not pipe.skipped: '
            "optimizer.step()`; pipe.scaler has the scale",
        )
    return original(scaler, optimizer, *more, **options)


CALLS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.nn.utils.clip_grad, "_get_total_norm", _clipping),  # whatever name clip_grad_norm_ was imported under
    (nn.Module, "state_dict", _reading),
    (torch.amp.GradScaler, "unscale_", _scaling),
    (torch.amp.GradScaler, "step", _scaling),
)
"""What is wrapped: where it is, its name, and what is called with it and its arguments."""
_ORIGINALS: list[Callable[..., Any]] = []


def notice(pipe: Open) -> Callable[[], None]:
    """Notice these calls for a pipe; return a function that ends it."""
    if not _OPEN:
        _ORIGINALS[:] = [getattr(home, name) for home, name, _ in CALLS]
        for (home, name, look), original in zip(CALLS, _ORIGINALS, strict=True):
            setattr(home, name, _wrapped(original, look))
    _OPEN.append(pipe)
    return functools.partial(_end, pipe)


def _wrapped(original: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return look(original, *args, **options)

    return call


def _end(pipe: Open) -> None:
    if pipe not in _OPEN:
        return
    _OPEN.remove(pipe)
    if not _OPEN:
        for (home, name, _), original in zip(CALLS, _ORIGINALS, strict=True):
            setattr(home, name, original)
