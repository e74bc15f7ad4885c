"""Find how much state an optimizer keeps by running one step of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph

ADAM = 2.0
"""Bytes of state per byte of parameter: two moments."""
_NAMED = {"sgd": 0.0, "momentum": 1.0, "adam": ADAM, "adamw": ADAM}
_MASTERS = "+masters"


def state_factor(optimizer: Any, param_bytes: int = 4, *, masters: bool = False) -> tuple[float, tuple[str, ...]]:
    """Return (bytes of optimizer state per byte of trainable parameter, notes).

    optimizer: None (charged as Adam, with a note), "sgd", "momentum", "adam" or "adamw", each also with "+masters"
    (fp32 master weights and fp32 state for parameters of param_bytes each), a class or function that takes parameters,
    or an optimizer.  masters: whether it updates master weights.  Raises UsageError.
    """
    if isinstance(optimizer, str):
        masters = masters or optimizer.lower().endswith(_MASTERS)
    notes = (
        ()
        if optimizer is not None
        else ("no optimizer was named: memory is charged for Adam; pass optimizer=torch.optim.SGD or the like",)
    )
    factor = _factor(optimizer)
    return (4 * (1 + factor) / param_bytes if masters and param_bytes < 4 else factor), notes


def _factor(optimizer: Any) -> float:
    """Return the bytes of state per byte of the tensors that an optimizer updates."""
    if optimizer is None:
        return ADAM
    if isinstance(optimizer, str):
        plain = optimizer.lower().removesuffix(_MASTERS)
        if plain not in _NAMED:
            known = ", ".join(_NAMED)
            fix = f'use one of {known}, with "{_MASTERS}" for fp32 master weights'
            raise UsageError(f"unknown optimizer {optimizer!r}", fix=fix)
        return _NAMED[plain]
    kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if isinstance(kind, type) and needs_closure(kind):
        raise UsageError(
            f"optimizer {kind.__name__} needs a closure",
            why="it needs all parameters at once and runs the model several times; a rank of a pipeline holds some "
            "of them",
            fix="use an optimizer that updates each parameter separately, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, options = type(optimizer), _arguments(type(optimizer), optimizer.defaults)
        return _tried(lambda params: kind(params, **options))
    if callable(optimizer):
        return _tried(optimizer)
    raise UsageError(
        f"optimizer is a {type(optimizer).__name__}", fix='use a class such as torch.optim.AdamW, or "adamw"'
    )


def needs_closure(kind: type) -> bool:
    """Return whether the step of an optimizer needs a function that runs the model."""
    closure = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    return closure is not None and closure.default is inspect.Parameter.empty


def _arguments(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that the class accepts as keywords; AdamW has one that only its base class accepts."""
    takes = inspect.signature(kind).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in takes):
        return dict(defaults)
    names = {p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in defaults.items() if name in names}


def _tried(make: Callable[[list[torch.nn.Parameter]], Any]) -> float:
    """Run one step on a square parameter; tensors of one element are counters and not charged."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    param.grad = torch.ones_like(param)
    try:
        made = make([param])
        made.step()
        state = [t for t in made.state[param].values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    except Exception as error:  # the user's own code
        raise UsageError(
            f"the optimizer cannot be tried: {type(error).__name__}",
            why=str(error),
            fix='pass a function of the parameters: optimizer=lambda params: torch.optim.SGD(params, lr=0.1), or "sgd"',
        ) from error
    return sum(t.nbytes for t in state) / param.nbytes


def narrowest_bytes(graph: Graph) -> int:
    """Return the bytes per element of the trainable parameter with the smallest dtype."""
    return min((p.size_bytes // max(1, math.prod(p.shape)) for p in graph.params if p.trainable), default=4)
