"""Gradient checkpointing inside a model: which activations are kept is the plan's to decide.

Both kinds compute what the function computes.  The ops of each call of the kind that is not reentrant are marked, so
that the plan can compute them again as a group.  The reentrant kind is ignored, with a warning.  It has no gradient at
all where none of its inputs needs one, which is kept: its parameters then learn nothing, in plain torch too.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopart.capture.guards import CaptureWarning
from autopart.capture.source_location import user_line

_MARK = "autopart_checkpoint"


def checkpointed(graph: fx.Graph) -> tuple[tuple[str, ...], ...]:
    """The names of the ops that each checkpointing of the model would compute again, in the order of the graph.

    Of one inside another the outer one counts.  O(nodes).
    """
    groups: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            number = (node.meta.get("custom") or {}).get(_MARK)
            if number is not None:
                groups.setdefault(number, []).append(node.name)
    return tuple(map(tuple, groups.values()))


def replacements() -> dict[str, Any]:
    """Patches for a trace: what the model checkpoints runs and is marked, or is warned of once."""
    numbers = itertools.count()
    warned: list[bool] = []

    def note() -> None:
        if not warned:
            warned.append(True)
            warnings.warn(
                "reentrant gradient checkpointing inside the model is not carried over: gradients stay exact, but the "
                "memory it saved is not saved; use_reentrant=False, or recompute= of compile, saves it "
                f"({user_line(traceback.extract_stack())})",
                CaptureWarning,
                stacklevel=1,  # the caller is torch, whose own warnings are silenced
            )

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        note()
        needed = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    def started(function: Any, preserve: Any, context_fn: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        return marked(context_fn)

    def marked(context_fn: Callable[[], Any]) -> Iterator[None]:
        mode = get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
        before = next(reversed(nodes), None)
        with context_fn()[0]:  # the user's, around the forward; nothing else is done: hooks would end up in the graph
            yield
        number = next(numbers)
        for node in itertools.takewhile(lambda node: node is not before, reversed(nodes)):
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: number}

    return {"CheckpointFunction.apply": lambda _, *args: run(*args), "checkpoint.generator": started}
