"""A capture at another number of rows without capturing again, for planning models that hold no weights.

The first capture is made at a prime number of rows that divides no size of the model or its inputs.  A size or argument
that it divides can then only come from the rows, and is scaled to the other number.  torch computes the shapes that
follow, once for equal calls, and they must be those that the same rule predicts.  If a number may depend on the rows in
another way (near a multiple, a fraction such as 1/rows, rows times rows), the model has to be captured again.

This cannot see Python code that takes another branch at another number of rows, so it serves plans that are not run;
`compile` captures everything that it runs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from autopart.batch.batch import Batch
from autopart.capture.capture import Captured
from autopart.capture.trace.functional import call_key, tensor_kind
from autopart.ir.graph import Graph, Size
from autopart.rng import keyed

_FROM, _TO = 61, 400
"""The range of primes: above sizes that are common in models, small enough for every op."""
_NEAR = 2
"""A number this close to a multiple of the rows may be a shifted multiple."""
_HUGE = 1 << 40
"""Larger numbers are not sizes: `x[a:]` has the end 2**63 - 1."""


class _Ambiguous(Exception):
    """A number may or may not come from the rows."""


def prime_batch_size(model: nn.Module, batch: Batch) -> int | None:
    """A number of rows that no other size of the model and its inputs can be mistaken for, if there is one."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for tensor, split in batch.tensors_and_splits():
        sizes.update(tensor.shape[1:] if split else tensor.shape)  # the first axis of what is split is the rows
    primes = (p for p in range(_FROM, _TO) if all(p % q for q in range(2, math.isqrt(p) + 1)))
    return next((p for p in primes if not any(_near(size, p) for size in sizes)), None)


def _near(number: int, rows: int) -> bool:
    """Whether a number is a multiple of the rows, or close to one."""
    return number >= rows - _NEAR and min(number % rows, -number % rows) <= _NEAR


def infer_other_size(captured: Captured, size: Size) -> Captured | None:
    """The capture as it would be at another size, None where that is unknown.  Its module stays the old one.

    Before: captured at `prime_batch_size` rows.  O(nodes), and one call on fake tensors for each kind of call.
    """
    change = _Change(captured.graph.rows, size.rows)
    try:
        shapes = _shapes(captured, change)
        graph = _resized(captured.graph, shapes, change)
    except Exception:  # an op may refuse the new sizes in any way of its own
        return None
    return replace(captured, graph=graph)


@dataclass(frozen=True)
class _Change:
    """From one number of rows to another."""

    old: int
    new: int

    def number(self, number: int) -> int:
        """A size or an argument after the change.  Raises _Ambiguous."""
        if abs(number) > _HUGE:
            return number
        share, rest = divmod(abs(number), self.old)
        if share and not rest:
            if not share % self.old:
                raise _Ambiguous  # rows against rows
            return share * self.new * (1 if number > 0 else -1)
        if _near(abs(number), self.old):
            raise _Ambiguous
        return number

    def share(self, number: float) -> float:
        """Return a float unchanged.  Raises _Ambiguous if it may be a multiple or a fraction of the rows."""
        whole = number * self.old
        if number and not number.is_integer() and math.isclose(whole, round(whole), rel_tol=1e-9):
            raise _Ambiguous
        if number.is_integer() and abs(number) < _HUGE and _near(abs(int(number)), self.old):
            raise _Ambiguous
        return number

    def literal(self, value: Any) -> Any:
        """An argument after the change, whatever it holds."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.literal(item) for item in value)
        if type(value) is int:
            return self.number(value)
        return self.share(value) if type(value) is float and math.isfinite(value) else value

    def shape(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """A shape after the change."""
        return tuple(self.number(size) for size in sizes)


def _shapes(captured: Captured, change: _Change) -> dict[str, tuple[int, ...]]:
    """The shape of every value after the change, as torch says.  Raises _Ambiguous when it is not the predicted one."""
    nodes = list(captured.module.graph.nodes)
    mode = detect_fake_mode([node.meta.get("val") for node in nodes])
    env: dict[fx.Node, Any] = {}
    known: dict[Hashable, Any] = {}
    found: dict[str, tuple[int, ...]] = {}
    assert mode is not None
    with mode, torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                env[node] = _given(node, captured, change)
            elif node.op == "call_function":
                env[node] = _called(node, env, known, change)
            else:
                continue
            _compare(node.meta["val"], env[node], change)
            if isinstance(env[node], torch.Tensor):
                found[captured.names.value(node)] = tuple(env[node].shape)
    return found


def _given(node: fx.Node, captured: Captured, change: _Change) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    shape = tuple(value.shape)
    if node.name in captured.names.inputs:
        shape = change.shape(shape)
    elif change.shape(shape) != shape:
        raise _Ambiguous  # a constant that was made of the rows
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _called(node: fx.Node, env: dict[fx.Node, Any], known: dict[Hashable, Any], change: _Change) -> Any:
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if target is keyed:
        target, args = args[0], args[2:]
    args, kwargs = change.literal(args), {name: change.literal(value) for name, value in kwargs.items()}
    try:
        key, _ = call_key(target, args, kwargs, lambda operand: tensor_kind(env[operand]))
    except NotImplementedError:
        key = node
    if key not in known:
        args, kwargs = fx.map_arg((args, kwargs), env.__getitem__)
        known[key] = target(*args, **kwargs)
    return known[key]


def _compare(old: Any, new: Any, change: _Change) -> None:
    for before, after in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
        if change.shape(before.shape) != tuple(after.shape) or before.dtype != after.dtype:
            raise _Ambiguous


def _resized(graph: Graph, shapes: dict[str, tuple[int, ...]], change: _Change) -> Graph:
    values = tuple(
        replace(v, shape=shapes[v.name], size_bytes=v.size_bytes // math.prod(v.shape) * math.prod(shapes[v.name]))
        if shapes[v.name] != v.shape
        else v
        for v in graph.values
    )
    ops = tuple(replace(op, attrs=tuple((name, change.literal(value)) for name, value in op.attrs)) for op in graph.ops)
    return replace(graph, size=Size(change.new), values=values, ops=ops)
