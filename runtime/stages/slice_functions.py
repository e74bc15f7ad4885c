"""Functions that the code of a slice calls in place of captured ops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from autopart.rng import keyed, keyed_rows, memory_order


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, **others: Any
) -> torch.Tensor:
    """Compute causal attention of queries from token `start` on to the keys of all tokens up to the last query."""
    others = {name: arg for name, arg in others.items() if name not in ("attn_mask", "is_causal")}
    if start == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **others)
    mask = _causal_mask(start, query.shape[-2], key.shape[-2], query.dtype, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **others)


_MASKS: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()


def _causal_mask(start: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what is added to the scores of queries from token `start` on.

    All layers and micro-batches under way save the same tensor for their backward; of a mask of bools each call of
    attention would make a copy."""
    found = _MASKS.get((start, queries, keys, dtype, device))
    if found is None:
        found = torch.full((queries, keys), -math.inf, dtype=dtype, device=device).triu(start + 1)
        _MASKS[start, queries, keys, dtype, device] = found
    return found


def joined(blocks: Sequence[torch.Tensor], axis: int, stride: int) -> torch.Tensor:
    """Join slices of tokens, in order, along an axis of stride * tokens * block entries."""
    if stride == 1:
        return torch.cat(list(blocks), axis)
    parts = [torch.unflatten(block, axis, (stride, block.shape[axis] // stride)) for block in blocks]
    return torch.cat(parts, axis + 1).flatten(axis, axis + 1)


def last_of(block: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the last entry along an axis, as an axis of size 1."""
    return block.narrow(axis, block.shape[axis] - 1, 1)


def part_of(whole: torch.Tensor, axis: int, stride: int, tokens: int, low: int, high: int) -> torch.Tensor:
    """Return tokens [low, high) of `tokens` along an axis of stride * tokens * block entries."""
    if stride == 1:
        block = whole.shape[axis] // tokens
        return whole.narrow(axis, low * block, (high - low) * block)
    parts = torch.unflatten(whole, axis, (stride, tokens, whole.shape[axis] // (stride * tokens)))
    return parts.narrow(axis + 1, low, high - low).flatten(axis, axis + 2)


Rows = tuple[tuple[tuple[int, int] | None, ...], tuple[tuple[int, int] | None, ...], int | None]
"""`given`, `made` and `size_at` of `rng.keyed_rows`, of tensors that hold the whole sequence."""
Places = tuple[tuple[int, int, int, int, int, int], ...]
"""(axis, stride, block, tokens, low, high) of each axis with tokens, the last axis first: it holds [low, high) of
`tokens`, as stride * (high - low) * block entries."""


def drawn(
    op: Callable[..., Any],
    number: int,
    rows: Rows | None,
    given: Sequence[Places],
    made: Places,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a random op as `rng.keyed` does, on the whole sequence, so that what it draws does not depend on slices.

    Tokens outside the slice are filled with ones.  rows: for `rng.keyed_rows`, if the op also runs for the rows of
    other replicas.  given: where each tensor argument lies in the whole; made: the slice's part of each result."""
    places = iter(given)

    def whole(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor) or not (own := next(places)):
            return arg
        return among_all(arg, own, memory_order(arg))

    args, kwargs = map_aggregate((args, kwargs), whole)
    found = keyed(op, number, *args, **kwargs) if rows is None else keyed_rows(op, number, *rows, *args, **kwargs)
    return own_of(found, made)


def own_of(found: Any, made: Places) -> Any:
    """Return the part of a result, or of each of several, that lies at these places."""
    if not isinstance(found, torch.Tensor):
        return tuple([own_of(each, made) for each in found])
    for axis, stride, _, tokens, low, high in made:
        found = part_of(found, axis, stride, tokens, low, high)
    return found


def among_all(tensor: torch.Tensor, places: Places, order: Sequence[int]) -> torch.Tensor:
    """Place the tensor in a whole one, whose axes lie in this order in memory, in which some ops draw."""
    sizes = list(tensor.shape)
    for axis, stride, block, tokens, _, _ in places:
        sizes[axis] = stride * tokens * block
    filled = torch.empty_permuted(sizes, tuple(order), dtype=tensor.dtype, device=tensor.device).fill_(1)
    place = filled
    for axis, stride, block, tokens, low, high in places:
        place = torch.unflatten(place, axis, (stride, tokens, block)).narrow(axis + 1, low, high - low)
        tensor = torch.unflatten(tensor, axis, (stride, high - low, block))
    place.copy_(tensor)
    return filled


def counted(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return what the mean of a loss over classes divides by."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()
