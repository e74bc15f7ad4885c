"""Calls of torch that act on a model, its gradients or its optimizer without asking the pipe, and would mislead.

These functions are wrapped from the first pipe that is open to the last one (`notice`).  What every rank has to do
alike between two steps is counted, and compared with the next step (`Open.counted`, `Open.compare`).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from autopart.ir.errors import UsageError, UsageWarning
from autopart.session.executors.step_end import StepEnd
from autopart.session.ranks.listener import Listener
from autopart.state.misuse_guards import Loss, refuse_backward

_COUNTED = {
    "optimizer.step()": "each rank's optimizer updates what that rank holds",
    "optimizer.zero_grad()": "the gradients of the other ranks add up",
    "model.load_state_dict()": "the other ranks go on with the values that they had",
}
_RATE = "the learning rates"
"""What has to be done alike between two steps, and what follows if it is not."""


@dataclass(eq=False)
class Open(Listener):
    """An open pipe.

    model: that was compiled.  held: returns what this rank holds.  ours: returns what this rank's optimizers may be
    made of.  parted: returns whether ranks hold parts of the model.  idle: returns whether no call runs, and the model
    has not the values of all ranks for a while.  stale: returns whether steps were taken since the model got the values
    of all ranks.  counts: of `_COUNTED` since the last step.  rate: sum of the learning rates since then, -inf where
    groups have different ones.
    """

    model: nn.Module
    held: Callable[[], Iterable[torch.Tensor]]
    ours: Callable[[], Iterable[torch.Tensor]]
    parted: Callable[[], bool]
    idle: Callable[[], bool]
    stale: Callable[[], bool]
    warned: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    rate: float = 0.0

    def warn(self, what: str, instead: str, frames: int) -> None:
        """Warn once, on the line that called torch: this number of frames above the wrapped function."""
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(f"{what}: {instead}", UsageWarning, stacklevel=3 + frames)

    @property
    def misleads(self) -> bool:
        """Whether the model has old values where other ranks train, and somebody may look at them."""
        return self.parted() and self.stale() and self.idle()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is made of this pipe's parameters, or of none on this rank."""
        driven = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return not driven or any(id(one) in driven for one in self.ours())

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer; warn of one that can update nothing."""
        if self.has(optimizer):
            rates = {group.get("lr") for group in optimizer.param_groups}
            self.counts["optimizer.step()"] += 1
            # groups with rates of their own may lie on some ranks alone, as those of a layer do
            self.rate += next((float(r) for r in rates if len(rates) == 1 and isinstance(r, int | float)), -math.inf)
        elif self.stale() and not any(pipe.has(optimizer) for pipe in _OPEN) and _updates_nothing(optimizer):
            self.warn(
                "an optimizer has none of the pipe's parameters, and no gradient of others: it updates nothing",
                "make it from pipe.parameters(), after compile",
                frames=5,
            )

    def counted(self) -> list[float]:
        """See `Listener`: -inf for what this rank need not do, since it trains nothing."""
        found = [float(count) for count in self.counts.values()]
        found.append(self.rate if found[0] else -math.inf)
        if not all(found[:2]) and not any(tensor.requires_grad for tensor in self.held()):
            found[:2] = [-math.inf] * 2
        return found

    def step_ended(self, end: StepEnd) -> None:
        """Begin to count anew."""
        self.counts, self.rate = dict.fromkeys(_COUNTED, 0), 0.0

    def compare(self, numbers: list[tuple[float, float]]) -> None:
        """Warn, once for each, of what ranks did not do alike."""
        *counts, rates = numbers
        for (what, follows), (high, low) in zip(_COUNTED.items(), counts, strict=True):
            if high != low:
                told = f"since the last step, some rank called {what} {high:g} times and another one {low:g} times"
                self.warn(told, f"{follows}; call it on every rank", frames=0)
        (high, low), (steps, least) = rates, counts[0]
        if high != low and steps == least:
            told = f"{_RATE} of the ranks' optimizers differ: {high:g} on one rank, {low:g} on another, in sum"
            self.warn(told, "make the same groups, and step the scheduler, on every rank", frames=0)


_OPEN: list[Open] = []


def _updates_nothing(optimizer: torch.optim.Optimizer) -> bool:
    return all(one.grad is None for group in optimizer.param_groups for one in group["params"])


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


def _argument(args: Sequence[Any], options: Mapping[str, Any], place: int, *names: str) -> Any:
    """Return the argument of a call that is given at a place or under one of these names, None if neither."""
    return args[place] if len(args) > place else next((options[name] for name in names if name in options), None)


def _told(what: str, instead: str, place: int = 0, frames: int = 1) -> Callable[..., Any]:
    """Return a function that warns where the model is given, at this place, that a pipe trains over several ranks."""

    def look(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = _argument(args, options, place, "model")
        for pipe in _OPEN:
            if given is pipe.model and pipe.misleads:
                pipe.warn(what, instead, frames)
        return original(*args, **options)

    return look


def _loading(original: Callable[..., Any], module: nn.Module, *more: Any, **options: Any) -> Any:
    """Count the states that are loaded into the model."""
    for pipe in _OPEN:
        pipe.counts["model.load_state_dict()"] += module is pipe.model and pipe.idle()
    return original(module, *more, **options)


def _zeroing(original: Callable[..., Any], optimizer: torch.optim.Optimizer, *more: Any, **options: Any) -> Any:
    """Count how often gradients are zeroed."""
    for pipe in _OPEN:
        pipe.counts["optimizer.zero_grad()"] += pipe.has(optimizer)
    return original(optimizer, *more, **options)


def _restoring(original: Callable[..., Any], optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
    """Look at the state that an optimizer of a rank is given."""
    state = _argument(args, options, 0, "state_dict")
    numbers = [len(group.get("params", ())) for group in state.get("param_groups", ())] if hasattr(state, "get") else []
    own = [len(group["params"]) for group in optimizer.param_groups]
    if numbers != own and any(pipe.parted() and pipe.has(optimizer) for pipe in _OPEN):
        raise UsageError(
            "the state of another optimizer is loaded into that of one rank",
            why=f"it numbers its parameters, {sum(numbers)} in all, and this rank's optimizer has {sum(own)}",
            fix="pipe.load(folder, optimizer), with a folder of pipe.save; a plain run writes one with "
            "autopart.save_from(model, folder, optimizer, step=n)",
        )
    return original(optimizer, *args, **options)


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


def _differentiating(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Look at what is differentiated."""
    outputs = _argument(args, options, 0, "outputs", "tensors")
    if isinstance(outputs, Loss) or (isinstance(outputs, list | tuple) and any(isinstance(o, Loss) for o in outputs)):
        refuse_backward()
    return original(*args, **options)


_SYNCED = "call pipe.sync_model() before, on every rank; pipe.close() does that too"
CALLS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.nn.utils.clip_grad, "_get_total_norm", _clipping),  # whatever name clip_grad_norm_ was imported under
    (
        nn.Module,
        "state_dict",
        _told(
            "model.state_dict() of a model that a pipe trains has old values where other ranks train",
            "use pipe.state_dict(), or call pipe.sync_model() before; pipe.close() does that too",
        ),
    ),
    (
        nn.Module,
        "__getstate__",
        _told("a copy of a model that a pipe trains has old values where other ranks train", _SYNCED, frames=3),
    ),
    (
        swa_utils.AveragedModel,
        "update_parameters",
        _told(
            "torch's AveragedModel averages old values where other ranks train",
            "use autopart.AveragedModel(pipe), on every rank",
            place=1,
        ),
    ),
    (nn.Module, "load_state_dict", _loading),
    (torch.optim.Optimizer, "zero_grad", _zeroing),
    (torch.optim.Optimizer, "load_state_dict", _restoring),
    (torch.amp.GradScaler, "unscale_", _scaling),
    (torch.amp.GradScaler, "step", _scaling),
    (torch.autograd, "grad", _differentiating),
    (torch.autograd, "backward", _differentiating),
)
"""What is wrapped: where it is, its name, and what is called with it and its arguments."""
_ORIGINALS: list[Callable[..., Any]] = []


def notice(pipe: Open) -> Callable[[], None]:
    """Notice these calls for a pipe, and calls of its model; return a function that ends it."""
    if not _OPEN:
        _ORIGINALS[:] = [getattr(home, name) for home, name, _ in CALLS]
        for (home, name, look), original in zip(CALLS, _ORIGINALS, strict=True):
            setattr(home, name, _wrapped(original, look))
    _OPEN.append(pipe)
    if not isinstance(pipe.model._compiled_call_impl, _Called):
        pipe.model._compiled_call_impl = _Called(pipe.model)
    return functools.partial(_end, pipe)


class _Called:
    """Stands where `model.compile()` puts its code: calls of the model warn where it has old values."""

    of_a_pipe = True

    def __init__(self, model: nn.Module) -> None:
        self._model, self.before = model, model._compiled_call_impl

    def __call__(self, *args: Any, **options: Any) -> Any:
        for pipe in _OPEN:
            if pipe.model is self._model and pipe.misleads:
                pipe.warn(
                    "a call of the model that a pipe trains has old values where other ranks train",
                    "pipe.predict(inputs) and pipe.eval_loss(batch) evaluate; or call pipe.sync_model() before",
                    frames=1,
                )
        return (self.before or self._model._call_impl)(*args, **options)


def _wrapped(original: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return look(original, *args, **options)

    return call


def _end(pipe: Open) -> None:
    if pipe not in _OPEN:
        return
    _OPEN.remove(pipe)
    called = pipe.model._compiled_call_impl
    if isinstance(called, _Called) and not any(other.model is pipe.model for other in _OPEN):
        pipe.model._compiled_call_impl = called.before
    if not _OPEN:
        for (home, name, _), original in zip(CALLS, _ORIGINALS, strict=True):
            setattr(home, name, original)
