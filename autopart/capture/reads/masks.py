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
    if constants and not ask(_all_shown, [_source(factor, written) for factor in constants]):
        known = Effect.CAUSAL if square and ask(_Triangle(pair[0]), constants) else Effect.OTHER
    shown = ask(_all_shown, [_source(factor, written) for factor in others]) if others else True
    if shown or shown is None:
        return known if shown else Effect.OTHER
    if not square or all(_of_keys_alone(factor) for factor in others):
        return Effect.OTHER  # a key is hidden from its own query
    return Effect.CAUSAL if ask(_Triangle(pair[0]), [node]) else Effect.OTHER


def _all_shown(*masks: torch.Tensor) -> bool:
    """Return whether masks hide nothing."""
    return all(bool((mask if mask.dtype is torch.bool else mask == 0).all()) for mask in masks)


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


def _source(node: fx.Node, written: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the smallest node with the same numbers, broadcast or in another shape."""
    while (source := _before(node, written)) is not None:
        node = source
    return node


def _before(node: fx.Node, written: Callable[[fx.Node], bool]) -> fx.Node | None:
    """Return what a node shows in another shape, None if it makes its numbers or does not show all of them."""
    if node.target not in _SAME_NUMBERS or written(node):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or "val" not in source.meta or written(source):
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
