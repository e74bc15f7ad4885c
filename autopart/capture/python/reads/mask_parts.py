"""What an attention mask is made of: masks that together hide what it hides, and the small tensors behind them.

A mask of bools may be a conjunction, and a mask that is added to the scores may be a sum, or be filled with a number
that hides a key wherever a condition holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.capture.python.reads.questions import made_of

_aten = torch.ops.aten
HIDES = -1e30
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
class MaskPart:
    """A mask.  hides: whether True hides a key; else True shows it, or 0 in a mask of numbers."""

    node: fx.Node
    hides: bool = False


def parts_of(part: MaskPart, written: Written) -> Iterator[MaskPart]:
    """Yield the masks, broadcast against each other, that together hide what a mask hides; itself if it has none."""
    return _taken_apart(part, lambda node: whole(node, written), written)


def sources_of(part: MaskPart, ask: Ask, written: Written) -> Iterator[MaskPart]:
    """Yield the smallest tensors that show every key if, and only if, a mask does; their shapes say nothing."""
    return _taken_apart(part, lambda node: _source(node, ask, written), written)


def _taken_apart(part: MaskPart, seen: Callable[[fx.Node], fx.Node], written: Written) -> Iterator[MaskPart]:
    part = MaskPart(seen(part.node), part.hides)
    split = _split(part, written)
    if split is None:
        yield part
    for each in split or ():
        yield from _taken_apart(each, seen, written)


def bias_and_condition(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return what a mask adds to the scores where it hides nothing, and where that is; None for any other mask."""
    if node.target is not _aten.where.ScalarOther or not is_hiding(node.args[2]):
        return None
    condition, bias = node.args[:2]
    return (bias, condition) if isinstance(bias, fx.Node) and isinstance(condition, fx.Node) else None


def is_hiding(number: Any) -> bool:
    """Return whether a number, added to a score, hides a key."""
    return isinstance(number, (int, float)) and number <= HIDES


def _split(part: MaskPart, written: Written) -> list[MaskPart] | None:
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
        return [MaskPart(args[1], True)] if zeros and is_hiding(args[2]) else None
    operands = all(isinstance(arg, fx.Node) and (arg.meta["val"].dtype is torch.bool) is boolean for arg in args)
    if node.target in _NOT and boolean and operands:
        return [MaskPart(args[0], not part.hides)]
    if part.hides:
        return None
    if (node.target in _BOTH and boolean and operands) or (
        node.target is _aten.add.Tensor and not boolean and operands and not node.kwargs
    ):
        return [MaskPart(args[0]), MaskPart(args[1])]
    pair = bias_and_condition(node)
    if pair is None or pair[1].meta["val"].dtype is not torch.bool:
        return None
    return (
        [MaskPart(pair[1])]
        if pair[0].target in _ZEROS and not written(pair[0])
        else [MaskPart(pair[1]), MaskPart(pair[0])]
    )


def whole(node: fx.Node, written: Written) -> fx.Node:
    """Return the earliest node with the same numbers for each pair of query and key: layers share it."""
    while (source := _before(node, written)) is not None and shape(source)[-2:] == shape(node)[-2:]:
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
    if not isinstance(source, fx.Node) or "val" not in source.meta or source.meta["val"].dtype != _dtype(node):
        return None
    if node.target is _aten.slice.Tensor and shape(node) != shape(source):
        return None
    filled = _filling(source)
    return source if not written(node, filled) and not written(source, filled) else None


def _filling(node: fx.Node) -> fx.Node | None:
    """Return the op that filled in place what a node looks at in another shape afterwards, None for another op."""
    while node.target in _SAME_NUMBERS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.target in _FILLS else None


def _dtype(node: fx.Node) -> Any:
    return node.meta["val"].dtype


@dataclass(frozen=True)
class _ReadsAll:
    """Asks whether indices read every entry of a tensor of this shape.  given: which axes have an index."""

    shape: tuple[int, ...]
    given: tuple[bool, ...]

    def __call__(self, *indices: torch.Tensor) -> bool:
        """Return whether these indices, one for each axis that has one, read every entry."""
        of_axis = iter(indices)
        places = tuple(next(of_axis) if given else slice(None) for given in self.given)
        read = torch.zeros(self.shape, dtype=torch.bool, device=indices[0].device)
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
    if not all(is_constant(place) and not written(place) for place in indices):
        return None
    return source if ask(_ReadsAll(shape(source), tuple(p is not None for p in places)), indices) else None


def of_keys_alone(node: fx.Node) -> bool:
    """Return whether a mask is the same for every query."""
    while node.target is _aten.expand.default and "val" in node.all_input_nodes[0].meta:
        node = node.all_input_nodes[0]
    return len(shape(node)) < 2 or shape(node)[-2] == 1


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's result."""
    return tuple(node.meta["val"].shape)


def is_constant(node: fx.Node) -> bool:
    """Return whether a node depends on no input and no parameter."""
    return all(source.op != "placeholder" for source in made_of([node]))
