"""How much state an optimizer keeps, found by letting it take one step."""

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
    """(bytes of optimizer state per byte of trainable parameter, what to say about it).

    optimizer: None (charged as Adam, and said so), "sgd", "momentum", "adam" or "adamw", each also with "+masters"
    (float32 copies of the weights and float32 states beside parameters of param_bytes each), an optimizer class or
    function that takes parameters, or an optimizer.  masters: it drives such copies.  Raises UsageError.
    """
    if masters and param_bytes < 4:
        plain = optimizer.lower().removesuffix(_MASTERS) if isinstance(optimizer, str) else optimizer
        factor, notes = state_factor(plain)
        return 4 * (1 + factor) / param_bytes, notes
    if optimizer is None:
        return ADAM, ("no optimizer was named: memory is charged for Adam; pass optimizer=torch.optim.SGD or the like",)
    if isinstance(optimizer, str):
        return _named(optimizer, param_bytes), ()
    kind = type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if isinstance(kind, type) and needs_closure(kind):
        raise UsageError(
            f"optimizer {kind.__name__} needs a closure",
            why="it looks at all parameters at once and runs the model as often as it likes; each rank of a pipeline "
            "holds its own part of them",
            fix="use an optimizer that takes each parameter by itself, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, options = type(optimizer), _arguments(type(optimizer), optimizer.defaults)
        return _tried(lambda params: kind(params, **options)), ()
    if callable(optimizer):
        return _tried(optimizer), ()
    raise UsageError(
        f"optimizer is a {type(optimizer).__name__}", fix='use a class such as torch.optim.AdamW, or "adamw"'
    )


def needs_closure(kind: type) -> bool:
    """Whether the step of an optimizer cannot be called without a function that runs the model."""
    closure = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    return closure is not None and closure.default is inspect.Parameter.empty


def _named(name: str, param_bytes: int) -> float:
    plain = name.lower().removesuffix(_MASTERS)
    if plain not in _NAMED:
        known = ", ".join(_NAMED)
        raise UsageError(
            f"unknown optimizer {name!r}", fix=f'use one of {known}, with "{_MASTERS}" for float32 masters'
        )
    if plain == name.lower() or param_bytes >= 4:
        return _NAMED[plain]
    return 4 * (1 + _NAMED[plain]) / param_bytes


def _arguments(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those defaults that the class takes as keywords: AdamW's hold one that only its base class takes."""
    takes = inspect.signature(kind).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in takes):
        return dict(defaults)
    names = {p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in defaults.items() if name in names}


def _tried(make: Callable[[list[torch.nn.Parameter]], Any]) -> float:
    """One step over a square parameter; tensors of a single element are counters, not state."""
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
    """Bytes of one number of the narrowest trainable parameter."""
    return min((p.size_bytes // max(1, math.prod(p.shape)) for p in graph.params if p.trainable), default=4)
