"""What forward() takes apart row by row and joins again as it was: `torch.cat(list(x))`, `torch.cat(x.split(sizes))`.

Such a list has as many entries as the batch has rows, so every number of rows would have another program.  The join is
replaced by the tensor itself, reshaped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_TAKEN_ONE = {_aten.unbind.int}
_IN_ORDER = {
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.flatten.using_ints,
}  # fmt: skip
"""Ops that give a tensor another shape, its elements in the same order."""
_TAKEN_SOME = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default}


def rejoined(graph: fx.Graph) -> fx.Graph:
    """Return the graph without joins of all parts of one tensor in their order.  O(nodes).

    Its ops are numbered again, since the ops that are gone, one for each row, left gaps in the names.
    """
    found = False
    for node in list(graph.nodes):
        if node.target in (_aten.cat.default, _aten.stack.default):
            parts: Any = node.args[0]
            source = _source([_taken(part) for part in parts])
            if source is not None and _fits(node, source, shaped=any(part.target in _IN_ORDER for part in parts)):
                _replace(graph, node, source)
                found = True
    if not found:
        return graph
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    fresh = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        name = node.name if node.op != "call_function" else re.sub(r"_\d+$", "", node.name)
        env[node] = fresh.create_node(node.op, node.target, args, kwargs, name)
        env[node].meta = node.meta
    return fresh


def _taken(part: Any) -> Any:
    """Return the part before it was reshaped."""
    while isinstance(part, fx.Node) and part.target in _IN_ORDER:
        part = part.args[0]
    return part


def _source(parts: Sequence[Any]) -> fx.Node | None:
    """Return the op of which these are all results, in order; None if there is no such op."""
    if not parts or not all(isinstance(part, fx.Node) and part.target is operator.getitem for part in parts):
        return None
    taken = {part.args[0] for part in parts}
    source = taken.pop()
    if taken or source.target not in _TAKEN_ONE | _TAKEN_SOME:
        return None
    return source if [part.args[1] for part in parts] == list(range(len(source.meta["val"]))) else None


def _fits(join: fx.Node, source: fx.Node, *, shaped: bool) -> bool:
    """Return whether joining undoes the taking apart, up to a reshape.

    Along the first axis every part is a block of memory in order, whatever its shape; along others the parts must not
    have been reshaped.
    """
    whole, given = _whole(source).meta["val"], join.meta["val"]
    along = _axis(source, whole.dim(), 2 if source.target not in _TAKEN_ONE else 1)
    joined = _axis(join, given.dim(), 1)
    if whole.dtype != given.dtype or whole.numel() != given.numel():
        return False
    if shaped:
        return along == joined == 0
    if source.target in _TAKEN_SOME:
        return join.target is _aten.cat.default and along == joined
    return along == joined if join.target is _aten.stack.default else along == joined == 0


def _whole(source: fx.Node) -> fx.Node:
    """Return the tensor that is taken apart."""
    whole = source.args[0]
    assert isinstance(whole, fx.Node)
    return whole


def _axis(node: fx.Node, axes: int, place: int) -> int:
    axis = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    assert isinstance(axis, int)
    return axis % axes


def _replace(graph: fx.Graph, join: fx.Node, source: fx.Node) -> None:
    whole = _whole(source)
    shape = list(join.meta["val"].shape)
    if list(whole.meta["val"].shape) == shape:
        join.replace_all_uses_with(whole)
    else:
        with graph.inserting_before(join):
            same = graph.call_function(_aten.reshape.default, (whole, shape))
        same.meta.update(join.meta)
        join.replace_all_uses_with(same)
    graph.erase_node(join)
