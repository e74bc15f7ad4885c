"""Attention masks that the inputs decide: one that hides nothing, or exactly the later tokens, is left out.

While a model is traced it builds a mask even where none is needed, and attention with a mask runs on slower kernels.
The question what a mask hides is put to the whole batch, like those of the model's Python: a batch with another answer
is another kind of batch.  A mask that depends on parameters or buffers stays; a bias stays without what hides nothing.

A mask is taken apart into masks that together hide what it hides, and these into the small tensors behind them.  One of
bools may be a conjunction; one that is added to the scores may be a sum, or be filled with a number that hides a key
wherever a condition holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from autopart.batch.batch import Batch
from autopart.capture.python.reads.late import different_rows
from autopart.capture.python.reads.questions import made_of

ASKED = "attention mask"
"""What questions about masks give as the op that asks."""
_aten = torch.ops.aten
_HIDES = -1e30
"""A number that hides a key if it is added to a score, whatever the score: exp() of the sum is zero."""
_BOTH = {_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default}
_NOT = {_aten.logical_not.default, _aten.bitwise_not.default}
_FILLS = {_aten.masked_fill.Scalar, _aten.masked_fill_.Scalar}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
_CASTS = {_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default}
_SAME_NUMBERS = {
    *(_aten.expand.default, _aten.unsqueeze.default, _aten.alias.default, _aten.detach.default, _aten.clone.default),
    *(_aten.slice.Tensor, _aten.contiguous.default, _aten.view.default, _aten.reshape.default, *_CASTS),
}

Ask = Callable[[Callable[..., bool], Sequence[fx.Node]], bool | None]
"""Asks whether something holds for the values of nodes; None if they depend on more than inputs and constants."""
Written = Callable[..., bool]
"""Whether ops write to the memory of a node in place, as `questions.Origins.is_written`."""


@dataclass(frozen=True)
class _Part:
    """A mask.  hides: whether True hides a key; else True shows it, or 0 in a mask of numbers."""

    node: fx.Node
    hides: bool = False


def with_masks(batch: Batch, masks: tuple[str, ...]) -> Batch:
    """Return a batch that is not asked what its attention masks hide.  masks: what the first ones hide; others stay."""
    answers = batch.answers and tuple(answer for answer in batch.answers if answer[0] != ASKED)
    return replace(batch, masks=masks, answers=answers)


class Effect(StrEnum):
    """What a mask does to the scores of attention."""

    NONE = "hides nothing"
    CAUSAL = "hides later tokens"
    BIAS = "adds a bias and hides nothing"
    OTHER = "stays"


class Masks:
    """Judges each attention mask of a traced program once, and again after ops wrote to it in place.

    given: effects of the masks in the order in which attention meets them, to take over from another capture; None to
    ask.  found: the effects so far.
    """

    def __init__(self, given: tuple[str, ...] | None) -> None:
        self._given = given or ()
        self.found: list[str] = []
        self._known: dict[fx.Node, tuple[Effect, fx.Node]] = {}  # by mask, with the last op when it was judged
        self._biases: dict[fx.Node, torch.Tensor] = {}

    def note(self, node: fx.Node, args: Sequence[Any]) -> None:
        """Note a choice between numbers and one number, which may be a bias with a mask."""
        if len(args) == 3 and _is_hiding(args[2]) and isinstance(args[1], torch.Tensor):
            self._biases[node] = args[1]

    def without(self, node: fx.Node, args: Any, kwargs: Any, ask: Ask, written: Written) -> Any:
        """Return the arguments of attention, without a mask that is not needed.

        node: the mask.  written: whether ops write to the memory of a node in place.
        """
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        pair = given["query"].shape[-2], given["key"].shape[-2]
        if given.get("is_causal") or given["query"].dim() < 3:
            return args, kwargs
        node = _whole(node, written)
        if node not in self._known or written(node, None, self._known[node][1]):
            place = len(self.found)
            known = self._given[place] if place < len(self._given) else None
            self._known[node] = (
                Effect(known) if known else self._effect(node, pair, ask, written),
                next(iter(reversed(node.graph.nodes))),
            )
            self.found.append(self._known[node][0])
        effect = self._known[node][0]
        if effect is Effect.OTHER:
            return args, kwargs
        given |= {"attn_mask": self._biases.get(node) if effect is Effect.BIAS else None}
        return (), given | {"is_causal": effect is Effect.CAUSAL}

    def _effect(self, node: fx.Node, pair: tuple[int, int], ask: Ask, written: Written) -> Effect:
        found = _effect(node, pair, ask, written)
        split = _bias_and_condition(node)
        if found is not Effect.OTHER or split is None or node not in self._biases or written(node):
            return found
        bias = self._biases[node]
        if bias.dtype is not node.meta["val"].dtype or bias.dim() < 2:
            return found
        if any(written(each, None, node) for each in split):
            return found
        return Effect.BIAS if _effect(split[1], pair, ask, written) is Effect.NONE else Effect.OTHER


def _effect(node: fx.Node, pair: tuple[int, int], ask: Ask, written: Written) -> Effect:
    """Return what a mask does, by the cheapest questions that settle it.

    Its parts are constants, answered while tracing, and what depends on inputs, such as the padding of keys, which is
    small.
    """
    parts = list(_taken_apart(_Part(node), written))
    constants = [part for part in parts if _is_constant(part.node)]
    others = [part for part in parts if part not in constants]
    square = pair[0] == pair[1] > 1
    known = Effect.NONE
    if constants and not _shown(constants, ask, written):
        flags = tuple(part.hides for part in constants)
        if not (square and ask(_Hide(pair[0], flags), [part.node for part in constants])):
            return Effect.OTHER
        known = Effect.CAUSAL
    shown = _shown(others, ask, written) if others else True
    if shown or shown is None:
        return known if shown else Effect.OTHER
    if not square or all(_of_keys_alone(part.node) for part in others):
        return Effect.OTHER  # a key is hidden from its own query
    return Effect.CAUSAL if ask(_Hide(pair[0], (False,)), [node]) else Effect.OTHER


def _shown(parts: Sequence[_Part], ask: Ask, written: Written) -> bool | None:
    """Return whether masks hide nothing, None if that depends on more than inputs and constants."""
    sources = dict.fromkeys(source for part in parts for source in _taken_apart(part, written, ask))
    return ask(_Hide(0, tuple(source.hides for source in sources)), [source.node for source in sources])


@dataclass(frozen=True)
class _Hide:
    """Asks whether masks, (..., queries, keys), together hide exactly the later tokens of a sequence, or nothing.

    tokens: the length of the sequence; 0 for nothing.  hides: for each mask, whether True hides a key.
    """

    tokens: int
    hides: tuple[bool, ...]
    takes_late: ClassVar[bool] = True

    def __call__(self, *masks: Any) -> bool:
        """Return whether the masks, broadcast against each other, hide just that.  Waits for the device once, or for
        each different row."""
        return all(map(self._in_rows, different_rows(masks)))

    def _in_rows(self, masks: Sequence[torch.Tensor]) -> bool:
        shows = [_shows(mask, hides=hides) for mask, hides in zip(masks, self.hides, strict=True)]
        if not self.tokens:
            return bool(torch.stack([each.all() for each in shows]).all())
        shown = torch.ones((), dtype=torch.bool, device=masks[0].device)
        known = shown  # whether each number shows or hides
        for mask, each in zip(masks, shows, strict=True):
            shown = shown & each
            if mask.dtype is not torch.bool:
                known = known & ((mask == 0) | (mask <= _HIDES)).all()
        earlier = torch.ones((self.tokens, self.tokens), dtype=torch.bool, device=masks[0].device).tril()
        return bool((shown == earlier).all() & known)


def _shows(mask: torch.Tensor, *, hides: bool) -> torch.Tensor:
    """Return where a mask shows keys."""
    if mask.dtype is not torch.bool:
        return mask == 0
    return ~mask if hides else mask


def _taken_apart(part: _Part, written: Written, ask: Ask | None = None) -> Iterator[_Part]:
    """Yield the masks, broadcast against each other, that together hide what a mask hides; itself if it has none.

    ask: yield instead the smallest tensors that show every key if, and only if, a mask does; their shapes say nothing.
    """
    node = _whole(part.node, written) if ask is None else _source(part.node, ask, written)
    part = _Part(node, part.hides)
    split = _split(part, written)
    if split is None:
        yield part
    for each in split or ():
        yield from _taken_apart(each, written, ask)


def _bias_and_condition(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return what a mask adds to the scores where it hides nothing, and where that is; None for any other mask."""
    if node.target is not _aten.where.ScalarOther or not _is_hiding(node.args[2]):
        return None
    condition, bias = node.args[:2]
    return (bias, condition) if isinstance(bias, fx.Node) and isinstance(condition, fx.Node) else None


def _is_hiding(number: Any) -> bool:
    """Return whether a number, added to a score, hides a key."""
    return isinstance(number, (int, float)) and number <= _HIDES


def _split(part: _Part, written: Written) -> list[_Part] | None:
    """Return the operands that hide together what an op's result hides; None for any other op.

    The numbers of the operands count as they were when the op ran: None if one, or the result, is written to later."""
    node = part.node
    args: Any = node.args
    boolean = node.meta["val"].dtype is torch.bool
    read = node.all_input_nodes
    if not all("val" in each.meta for each in read) or any(written(each, None, node) for each in (node, *read)):
        return None
    if node.target in _FILLS and not boolean:
        zeros = args[0].target in _ZEROS and not written(args[0], node)
        return [_Part(args[1], True)] if zeros and _is_hiding(args[2]) else None
    operands = all(isinstance(arg, fx.Node) and (arg.meta["val"].dtype is torch.bool) is boolean for arg in args)
    if node.target in _NOT and boolean and operands:
        return [_Part(args[0], not part.hides)]
    if part.hides:
        return None
    if (node.target in _BOTH and boolean and operands) or (
        node.target is _aten.add.Tensor and not boolean and operands and not node.kwargs
    ):
        return [_Part(args[0]), _Part(args[1])]
    pair = _bias_and_condition(node)
    if pair is None or pair[1].meta["val"].dtype is not torch.bool:
        return None
    return [_Part(pair[1])] if pair[0].target in _ZEROS and not written(pair[0]) else [_Part(pair[1]), _Part(pair[0])]


def _whole(node: fx.Node, written: Written) -> fx.Node:
    """Return the earliest node with the same numbers for each pair of query and key: layers share it."""
    while (source := _before(node, written)) is not None and _shape(source)[-2:] == _shape(node)[-2:]:
        node = source
    return node


def _source(node: fx.Node, ask: Ask, written: Written) -> fx.Node:
    """Return the smallest node with the same numbers, broadcast, in another shape or read at constant places."""
    while (source := _before(node, written) or _indexed(node, ask, written)) is not None:
        node = source
    return node


def _before(node: fx.Node, written: Written) -> fx.Node | None:
    """Return what a node shows in another shape, None if it makes its numbers or does not show all of them."""
    if node.target not in _SAME_NUMBERS:
        return None
    source = node.args[0]
    if (
        not isinstance(source, fx.Node)
        or "val" not in source.meta
        or source.meta["val"].dtype != node.meta["val"].dtype
    ):
        return None
    if node.target is _aten.slice.Tensor and _shape(node) != _shape(source):
        return None
    filled = _filling(source)
    return source if not written(node, filled) and not written(source, filled) else None


def _filling(node: fx.Node) -> fx.Node | None:
    """Return the op that filled in place what a node looks at in another shape afterwards, None for another op."""
    while node.target in _SAME_NUMBERS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.target in _FILLS else None


def _read_all(shape: tuple[int, ...], given: tuple[bool, ...], *indices: torch.Tensor) -> bool:
    """Return whether indices, one for each axis that has one, read every entry of a tensor of this shape.

    given: which axes have an index.
    """
    of_axis = iter(indices)
    places = tuple(next(of_axis) if has else slice(None) for has in given)
    read = torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    read[places] = True
    return bool(read.all())


def _indexed(node: fx.Node, ask: Ask, written: Written) -> fx.Node | None:
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
    read_all = partial(_read_all, _shape(source), tuple(place is not None for place in places))
    return source if ask(read_all, indices) else None


def _of_keys_alone(node: fx.Node) -> bool:
    """Return whether a mask is the same for every query."""
    while node.target is _aten.expand.default and "val" in node.all_input_nodes[0].meta:
        node = node.all_input_nodes[0]
    return len(_shape(node)) < 2 or _shape(node)[-2] == 1


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _is_constant(node: fx.Node) -> bool:
    """Return whether a node depends on no input and no parameter."""
    return all(source.op != "placeholder" for source in made_of([node]))
