"""The code of one stage for one slice of tokens, and what that code calls which is no op of the captured program."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from autopart.rng import keyed, keyed_rows
from autopart.runtime.stages.joined_states import Joined
from autopart.runtime.stages.stage_module import StageModule


@dataclass(frozen=True)
class SliceModule:
    """code.module(*params, *inputs, *numbers, *past, *shared) returns the outputs, then the states, then what is added
    to those of `joined`.

    code.inputs: values received for this slice, values of the prologue at full length, and inputs of the batch.
    received: of those the first kind, whose gradients go back.  start, end: the tokens.
    states: values of which this slice's part is kept for later slices of the same micro-batch.  past: of which state
    and of which slice before each further argument is, in order: leaves, whose gradients belong to the state that the
    slice returned, and are summed over the later slices that read it.
    joined: states that lie in one tensor.  shared: of each that tensor, then what lies there before the slice, a leaf
    too, where the slice reads some of it.
    """

    code: StageModule
    start: int
    end: int
    received: tuple[str, ...]
    states: tuple[str, ...]
    past: tuple[tuple[str, int], ...]
    joined: tuple[Joined, ...] = ()


@dataclass(frozen=True)
class KeysSeen:
    """What a batch must satisfy: every query sees a key that is not after it, through all masks of op `op` together.
    One that sees none would look at all keys alike, later ones too, where masks hide with finite numbers.

    masks: (value, axis of queries, axis of keys, from which number on it lets see): axes are None where all are treated
    alike, the number is None where it lets see if it is not 0, and hides if it is not 0 where `inverted` says so.
    lifts: (value, axes, factor, most, least) of what else is added to the scores: so large that it undoes a mask it
    must not be, and up to the last number it hides.
    """

    op: str
    masks: tuple[tuple[str, int | None, int | None, float | None], ...]
    inverted: tuple[bool, ...]
    lifts: tuple[tuple[str, int | None, int | None, float, float, float], ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the masks, and of what else is added."""
        return tuple(dict.fromkeys([name for name, *_ in self.masks] + [name for name, *_ in self.lifts]))

    def holds(self, values: Mapping[str, torch.Tensor], tokens: int) -> bool:
        """values: of the prologue, or inputs, by name.  O(elements of the masks)."""
        seen: torch.Tensor | None = None
        for (name, queries, keys, lowest), inverted in zip(self.masks, self.inverted, strict=True):
            value = values[name]
            lets = (value == 0 if inverted else value != 0) if lowest is None else value > lowest
            lets = _cells(lets, queries, keys)
            if lowest is not None and bool((lets & ~_not_later(lets, tokens)).any()):
                return False
            seen = lets if seen is None else seen & lets
        assert seen is not None
        for name, queries, keys, factor, most, least in self.lifts:
            added = values[name] * factor
            if bool((added > most).any()):
                return False
            if least > -math.inf:
                seen = seen & _cells(added > least, queries, keys)
        return bool((seen & _not_later(seen, tokens)).any(-1).all())


def _cells(found: torch.Tensor, queries: int | None, keys: int | None) -> torch.Tensor:
    """The same with its axes of queries and keys last, of size 1 where it has none."""
    axes = [axis for axis in (queries, keys) if axis is not None]
    found = found.movedim(axes, list(range(-len(axes), 0)))
    found = found.unsqueeze(-1) if keys is None else found
    return found.unsqueeze(-2) if queries is None else found


def _not_later(cells: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where the key is not after the query.  cells: (..., queries, keys), 1 where all are treated alike; without the
    last tokens there may be fewer than `tokens`."""
    queries, keys = (size if size > 1 else tokens for size in cells.shape[-2:])
    return torch.ones(queries, keys, dtype=torch.bool, device=cells.device).tril()


@dataclass(frozen=True)
class SlicedStage:
    """A stage cut into slices.

    prologue: computes what the slices read of inputs and constants alone, once a micro-batch, without gradients; None
    where they read nothing of it.  slices: in order; the backward runs them from the last to the first.
    """

    prologue: StageModule | None
    slices: tuple[SliceModule, ...]


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, **others: Any
) -> torch.Tensor:
    """Causal attention of queries that begin at token `start` to the keys of all tokens up to their last."""
    others = {name: arg for name, arg in others.items() if name not in ("attn_mask", "is_causal")}
    if start == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **others)
    mask = _causal_mask(start, query.shape[-2], key.shape[-2], query.dtype, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **others)


_MASKS: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = weakref.WeakValueDictionary()


def _causal_mask(start: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of queries that begin at token `start`: one tensor for all layers and micro-batches
    under way, which each keep it for their backward.  Of a mask of bools every call of attention would make its own."""
    found = _MASKS.get((start, queries, keys, dtype, device))
    if found is None:
        found = torch.full((queries, keys), -math.inf, dtype=dtype, device=device).triu(start + 1)
        _MASKS[start, queries, keys, dtype, device] = found
    return found


def joined(blocks: Sequence[torch.Tensor], axis: int, stride: int) -> torch.Tensor:
    """Slices of tokens, in order, as one: tokens lie behind the first `stride` entries of an axis."""
    if stride == 1:
        return torch.cat(list(blocks), axis)
    parts = [torch.unflatten(block, axis, (stride, block.shape[axis] // stride)) for block in blocks]
    return torch.cat(parts, axis + 1).flatten(axis, axis + 1)


def last_of(block: torch.Tensor, axis: int) -> torch.Tensor:
    """The last entry along an axis, which stays."""
    return block.narrow(axis, block.shape[axis] - 1, 1)


def part_of(whole: torch.Tensor, axis: int, stride: int, tokens: int, low: int, high: int) -> torch.Tensor:
    """Tokens [low, high) of `tokens` along an axis of stride * tokens * block."""
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
    """`rng.keyed` for a slice: the op runs on the whole sequence, what the slice does not have filled with ones, so
    that what it draws does not depend on slices.  rows: where it runs for those of other replicas too.  given: where
    each tensor that it takes lies in the whole; made: which part of its results is the slice's."""
    places = iter(given)

    def whole(arg: Any) -> Any:
        return _among_all(arg, next(places)) if isinstance(arg, torch.Tensor) else arg

    args, kwargs = map_aggregate((args, kwargs), whole)
    found = keyed(op, number, *args, **kwargs) if rows is None else keyed_rows(op, number, *rows, *args, **kwargs)
    return _own(found, made) if isinstance(found, torch.Tensor) else tuple(_own(part, made) for part in found)


def _own(found: torch.Tensor, made: Places) -> torch.Tensor:
    for axis, stride, _, tokens, low, high in made:
        found = part_of(found, axis, stride, tokens, low, high)
    return found


def _among_all(tensor: torch.Tensor, places: Places) -> torch.Tensor:
    """The tensor as part of one of the whole sequence, with its own order of memory, in which some ops draw."""
    if not places:
        return tensor
    sizes, strides = list(tensor.shape), tensor.stride()
    for axis, stride, block, tokens, _, _ in places:
        sizes[axis] = stride * tokens * block
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    filled = torch.empty_permuted(sizes, order, dtype=tensor.dtype, device=tensor.device).fill_(1)
    place = filled
    for axis, stride, block, tokens, low, high in places:
        place = torch.unflatten(place, axis, (stride, tokens, block)).narrow(axis + 1, low, high - low)
        tensor = torch.unflatten(tensor, axis, (stride, high - low, block))
    place.copy_(tensor)
    return filled


def counted(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None = None) -> torch.Tensor:
    """What the mean of a loss over classes divides by."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()
