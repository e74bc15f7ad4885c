"""Large results of elementwise ops that are computed a row at a time, when a question asks about them.

A mask of 61 sequences of 8,192 tokens has 4 billion elements, and is made of positions that have half a million.  A
property of such a mask holds if it holds for each of its rows, and rows that are made of equal numbers are equal.  So
the operands are kept, and each different row is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

LARGE = 1 << 24
"""Elements from which on a result is not computed as a whole."""


@dataclass(frozen=True)
class Late:
    """The result of an elementwise op that is not computed yet.

    shape: its sizes.  args, kwargs: may contain others.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size


def whole(leaf: Any) -> Any:
    """Return what stands for a result as that result, and anything else as it is.  O(elements)."""
    if not isinstance(leaf, Late):
        return leaf
    args, kwargs = pytree.tree_map(whole, (leaf.args, leaf.kwargs))
    return leaf.call(*args, **kwargs)


def late(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Late | None:
    """Return what stands for the result of a large elementwise op that writes to nothing; None for other ops."""
    if not isinstance(call, torch._ops.OpOverload) or torch.Tag.pointwise not in call.tags or call._schema.is_mutable:
        return None
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Late | torch.Tensor)]
    shape = torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return Late(call, tuple(args), dict(kwargs), shape) if shape.numel() >= LARGE and shape[0] > 1 else None


def different_rows(masks: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield masks, (..., queries, keys), row by row of the first dimension, equal rows once.

    They are broadcast against each other.  Where none of them is late, yields them as they are.
    O(rows^2 * elements of operands) at most, and the elements of the different rows.
    """
    most = max([len(mask.shape) for mask in masks])
    counts = [mask.shape[0] for mask in masks if isinstance(mask, Late) and len(mask.shape) == most]
    if not counts:
        yield tuple(map(whole, masks))
        return
    seen: list[list[torch.Tensor]] = []
    for place in range(max(counts)):
        rows = [_row(mask, place, most) for mask in masks]
        made_of = _numbers(rows)
        pairs = (zip(made_of, known, strict=True) for known in seen)
        if not any(all(one is other or torch.equal(one, other) for one, other in each) for each in pairs):
            seen.append(made_of)
            yield tuple(map(whole, rows))


def _row(leaf: Any, place: int, axes: int) -> Any:
    """Return one place of the first of so many dimensions, which is kept; what is broadcast there as it is."""
    if not isinstance(leaf, Late | torch.Tensor) or len(leaf.shape) < axes or leaf.shape[0] == 1:
        return leaf
    if isinstance(leaf, torch.Tensor):
        return leaf[place : place + 1]
    args, kwargs = pytree.tree_map(lambda part: _row(part, place, len(leaf.shape)), (leaf.args, leaf.kwargs))
    return Late(leaf.call, args, kwargs, torch.Size((1, *leaf.shape[1:])))


def _numbers(value: Any) -> list[torch.Tensor]:
    """Return the tensors that a value is made of."""
    leaves = pytree.tree_leaves(value)
    found = [_numbers((leaf.args, leaf.kwargs)) if isinstance(leaf, Late) else [leaf] for leaf in leaves]
    return [leaf for own in found for leaf in own if isinstance(leaf, torch.Tensor)]
