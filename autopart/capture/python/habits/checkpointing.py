"""Activation checkpointing inside a model: the plan decides which activations are kept.

Both kinds compute what the function computes.  With use_reentrant=False the ops of each call are marked, so that the
plan can recompute them as a group.  With use_reentrant=True checkpointing is ignored, with a warning.  That kind gives
no gradient at all where none of its inputs needs one, which is kept: its parameters learn nothing in plain torch too.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopart.capture.python.guards import CaptureWarning
from autopart.capture.source_location import user_line

_MARK = "autopart_checkpoint"
_numbers = itertools.count()


def checkpointed(graph: fx.Graph) -> tuple[tuple[str, ...], ...]:
    """Return the names of the ops that each checkpoint of the model would recompute, in the order of the graph.

    Of nested checkpoints the outer one counts.  O(nodes).
    """
    groups: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            number = (node.meta.get("custom") or {}).get(_MARK)
            if number is not None:
                groups.setdefault(number, []).append(node.name)
    return tuple(map(tuple, groups.values()))


def run_reentrant(original: Any, cls: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Run a function that is checkpointed with use_reentrant=True, and warn."""
    warnings.warn(
        "reentrant gradient checkpointing inside the model is not carried over: gradients stay exact, but the "
        "memory it saved is not saved; use_reentrant=False, or recompute= of compile, saves it "
        f"({user_line()})",
        CaptureWarning,
        stacklevel=1,  # the caller is torch, whose own warnings are silenced
    )
    needed = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with contextlib.nullcontext() if needed else torch.no_grad():
        return function(*args)


def mark(
    original: Any, function: Any, preserve: Any, context_fn: Callable[[], Any], *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Mark the ops that are traced while a function runs that is checkpointed with use_reentrant=False."""
    mode = get_proxy_mode()
    nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
    before = next(reversed(nodes), None)
    with context_fn()[0]:  # the user's, around the forward; nothing else is done: hooks would end up in the graph
        yield
    number = next(_numbers)
    for node in itertools.takewhile(lambda node: node is not before, reversed(nodes)):
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: number}
