"""Calls that are alike: what holds for one of them holds for all.

Where no op writes to memory, what becomes of a call depends on the op, its arguments and the shapes, strides and types
of its operands alone.  A deep model repeats a few dozen calls: whoever asks torch about an op asks once for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class _Place:
    """Stands for an operand, by its number."""

    number: int


def call_key(
    target: Any, args: Any, kwargs: Any, kind_of: Callable[[fx.Node], Hashable]
) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """A key that is equal for calls that are alike, and the operands of this one.  Raises NotImplementedError."""
    operands: dict[fx.Node, int] = {}
    number: Any = lambda operand: _Place(operands.setdefault(operand, len(operands)))  # noqa: E731
    shape = fx.map_arg((args, kwargs), number)
    return (target, _frozen(shape), tuple(map(kind_of, operands))), tuple(operands)


def tensor_kind(value: Any) -> Hashable:
    """What a call can tell of an operand without reading it, gradients aside.  Raises NotImplementedError."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise NotImplementedError
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if value.is_complex() or value.is_conj() or value.is_neg() or not all(type(size) is int for size in sizes):
        raise NotImplementedError
    return (sizes, value.dim(), value.dtype, value.device)


def _frozen(value: Any) -> Hashable:
    """An argument as a key: equal for arguments that no op can tell apart."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotImplementedError
    return (type(value), repr(value))
