"""Attention masks that the inputs decide: one that hides nothing, or exactly the later tokens, is left out.

While a model is traced it builds a mask even where none is needed, and attention with a mask runs on slower kernels.
What a mask hides is asked of the whole batch, like all that the model's Python asks: a batch with another answer is
another kind of batch.  A mask that depends on parameters or buffers stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
ASKED = "attention mask"
"""What questions about masks give as the op that asks."""
_HIDES = -1e30
"""A number that hides a key if it is added to a score, whatever the score: exp() of the sum is zero."""
_BOTH = {_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default}
_CASTS = {_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default}
_SAME_NUMBERS = {
    *(_aten.expand.default, _aten.unsqueeze.default, _aten.alias.default, _aten.detach.default, _aten.clone.default),
    *(_aten.slice.Tensor, _aten.contiguous.default, _aten.view.default, _aten.reshape.default),
}

Ask = Callable[[Callable[..., bool], Sequence[fx.Node]], bool | None]
"""Asks whether something holds for the values of nodes; None if they depend on more than inputs and constants."""


class Effect(StrEnum):
    """What a mask does to the scores of attention."""

    NONE = "hides nothing"
    CAUSAL = "hides later tokens"
    OTHER = "stays"


class Masks:
    """Judges each attention mask of a traced program once.

    given: effects of the masks in the order in which attention meets them, to take over from another capture; None to
    ask.  found: the effects so far.
    """

    def __init__(self, given: tuple[str, ...] | None) -> None:
        self._given = given or ()
        self.found: list[str] = []
        self._known: dict[fx.Node, Effect] = {}

    def without(self, node: fx.Node, args: Any, kwargs: Any, ask: Ask, written: Callable[[fx.Node], bool]) -> Any:
        """Return the arguments of attention, without a mask that is not needed.

        node: the mask.  written: whether ops write to the memory of a node in place.
        """
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        pair = given["query"].shape[-2], given["key"].shape[-2]
        if given.get("is_causal") or given["query"].dim() < 3:
            return args, kwargs
        node = _whole(node, written)
        if node not in self._known:
            place = len(self.found)
            known = self._given[place] if place < len(self._given) else None
            self._known[node] = Effect(known) if known else _effect(node, pair, ask, written)
            self.found.append(self._known[node])
        if self._known[node] is Effect.OTHER:
            return args, kwargs
        given |= {"attn_mask": None, "is_causal": self._known[node] is Effect.CAUSAL}
        return (), given


def _effect(node: fx.Node, pair: tuple[int, int], ask: Ask, written: Callable[[fx.Node], bool]) -> Effect:
    """Return what a mask does, by the cheapest questions that settle it.

    A mask of bools may be a conjunction: of constants, answered while tracing, and of what depends on inputs, such as
    the padding of keys, which is small.
    """
    factors = list(_factors(node, written))
    constants = [factor for factor in factors if _is_constant(factor)]
    others = [factor for factor in factors if factor not in constants]
    square = pair[0] == pair[1] > 1
    known = Effect.NONE
    if constants and not ask(_all_shown, [_source(factor, ask, written) for factor in constants]):
        known = Effect.CAUSAL if square and ask(_Triangle(pair[0]), constants) else Effect.OTHER
    shown = ask(_all_shown, [_source(factor, ask, written) for factor in others]) if others else True
    if shown or shown is None:
        return known if shown else Effect.OTHER
    if not square or all(_of_keys_alone(factor) for factor in others):
        return Effect.OTHER  # a key is hidden from its own query
    return Effect.CAUSAL if ask(_Triangle(pair[0]), [node]) else Effect.OTHER


def _all_shown(*masks: torch.Tensor) -> bool:
    """Return whether masks hide nothing."""
    return all(bool((mask if mask.dtype is torch.bool else mask == 0).all()) for mask in masks)


class _ReadsAll:
    """Whether indices read every entry of a tensor of this shape.  given: which axes have an index."""

    def __init__(self, shape: tuple[int, ...], given: tuple[bool, ...]) -> None:
        self._shape, self._given = shape, given

    def __call__(self, *indices: torch.Tensor) -> bool:
        """Return it.  indices: of the axes that have one, in order."""
        of_axis = iter(indices)
        places = tuple(next(of_axis) if given else slice(None) for given in self._given)
        read = torch.zeros(self._shape, dtype=torch.bool, device=indices[0].device)
        read[places] = True
        return bool(read.all())


class _Triangle:
    """Whether the conjunction of masks hides exactly what comes later in sequences of this length."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, *masks: torch.Tensor) -> bool:
        """Return it.  masks: broadcast against each other, (..., queries, keys)."""
        pair = self._tokens, self._tokens
        earlier = torch.ones(pair, dtype=torch.bool, device=masks[0].device).tril()
        if masks[0].dtype is torch.bool:
            shown = masks[0]
            for mask in masks[1:]:
                shown = shown & mask
            return bool((shown == earlier).all())
        (mask,) = masks
        return bool(torch.where(earlier, mask == 0, mask <= _HIDES).all())


def _factors(node: fx.Node, written: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the masks of bools whose conjunction a mask is; the mask itself if it is no conjunction."""
    if node.target in _BOTH and node.meta["val"].dtype is torch.bool and not written(node):
        for arg in node.args:
            if not isinstance(arg, fx.Node) or arg.meta["val"].dtype is not torch.bool:
                yield node
                return
        for arg in node.all_input_nodes:
            yield from _factors(arg, written)
    else:
        yield node


def _whole(node: fx.Node, written: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the earliest node with the same numbers for each pair of query and key: layers share it."""
    while (source := _before(node, written)) is not None and _shape(source)[-2:] == _shape(node)[-2:]:
        node = source
    return node


def _source(node: fx.Node, ask: Ask, written: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the smallest node with the same numbers, broadcast, in another shape or read at constant places."""
    while (source := _before(node, written) or _indexed(node, ask, written)) is not None:
        node = source
    return node


def _indexed(node: fx.Node, ask: Ask, written: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return what a node reads at constant places, each at least once; None for any other op."""
    if node.target is not _aten.index.Tensor or written(node):
        return None
    source: Any = node.args[0]
    places: Any = node.args[1]
    indices = [place for place in places if place is not None]
    if "val" not in source.meta or written(source):
        return None
    if not all(_is_constant(place) and not written(place) for place in indices):
        return None
    return source if ask(_ReadsAll(_shape(source), tuple(p is not None for p in places)), indices) else None


def _before(node: fx.Node, written: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return what a node shows in another shape, None if it makes its numbers or does not show all of them."""
    if node.target not in _SAME_NUMBERS | _CASTS or written(node):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or "val" not in source.meta or written(source):
        return None
    if node.target in _CASTS and source.meta["val"].dtype is not node.meta["val"].dtype:
        return None
    return source if node.target is not _aten.slice.Tensor or _shape(node) == _shape(source) else None


def _of_keys_alone(node: fx.Node) -> bool:
    """Return whether a mask is the same for every query."""
    while node.target is _aten.expand.default and "val" in node.all_input_nodes[0].meta:
        node = node.all_input_nodes[0]
    return len(_shape(node)) < 2 or _shape(node)[-2] == 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node depends on no input and no parameter."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return False
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return True
