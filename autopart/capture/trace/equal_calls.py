"""Keys of calls: calls with equal keys become the same ops."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from autopart.capture.python.reads.questions import Operand


def call_key(
    target: Any, args: Any, kwargs: Any, kind_of: Callable[[fx.Node], Hashable]
) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """Return a key that is equal for calls with equal effects, and the operands of this call.

    The key holds the op, its arguments, and shapes, strides and types of its operands.  Raises NotImplementedError for
    sizes that depend on data, and for complex or quantized operands.
    """
    operands: dict[fx.Node, int] = {}
    number: Any = lambda operand: Operand(operands.setdefault(operand, len(operands)))  # noqa: E731
    shape = fx.map_arg((args, kwargs), number)
    return (target, frozen(shape), tuple(map(kind_of, operands))), tuple(operands)


def tensor_kind(value: Any) -> Hashable:
    """Return the part of a key for one operand.  Raises NotImplementedError."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise NotImplementedError
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if value.is_complex() or value.is_conj() or value.is_neg() or not all(type(size) is int for size in sizes):
        raise NotImplementedError
    return (sizes, value.dim(), value.dtype, value.device)


def frozen(value: Any) -> Hashable:
    """Return an argument as a key, equal for arguments that no op can tell apart."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(item)) for name, item in value.items())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotImplementedError
    return (type(value), repr(value))
