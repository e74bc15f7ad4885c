"""What would give each number of rows, or each length of sequences, a program of its own.

- A tensor that is taken apart row by row and joined again as it was: `torch.cat(list(x))`, `torch.cat(x.split(sizes))`.
  Such a list has as many entries as the batch has rows.  The join is replaced by the tensor itself, reshaped.
- A slice such as mask[:, :, :T, :T] of a parameter or a buffer that has just T elements there.  Torch returns the
  tensor itself then.  The slice is recorded as one of a longer tensor is.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_TAKEN_SOME = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default}
_IN_ORDER = {
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.unsqueeze.default,
    _aten.flatten.using_ints,
}  # fmt: skip
"""Ops that give a tensor another shape, its elements in the same order."""
_SIMPLE = (int, slice, type(None), type(...))


def rejoined(graph: fx.Graph) -> fx.Graph:
    """Return the graph without joins of all parts of one tensor in their order.  O(nodes).

    Its ops are numbered again, since the ops that are gone, one for each row, left gaps in the names.
    """
    found = False
    for join in list(graph.nodes):
        whole = _taken_apart(join) if join.target in (_aten.cat.default, _aten.stack.default) else None
        if whole is not None:
            found = True
            shape = list(join.meta["val"].shape)
            if list(whole.meta["val"].shape) != shape:
                with graph.inserting_before(join):
                    whole = graph.call_function(_aten.reshape.default, (whole, shape))
                whole.meta.update(join.meta)
            join.replace_all_uses_with(whole)
            graph.erase_node(join)
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


def _taken_apart(join: fx.Node) -> fx.Node | None:
    """Return the tensor that was taken apart and that a join makes again, up to a reshape; None if there is none.

    Along the first axis every part is a block of memory in order, whatever its shape; along others the parts must not
    have been reshaped.
    """
    parts: Any = join.args[0]
    picks: list[Any] = []
    for pick in parts:
        while isinstance(pick, fx.Node) and pick.target in _IN_ORDER:
            pick = pick.args[0]
        picks.append(pick)
    if not picks or not all(isinstance(pick, fx.Node) and pick.target is operator.getitem for pick in picks):
        return None
    source = picks[0].args[0]
    one = source.target is _aten.unbind.int
    if any(pick.args[0] is not source for pick in picks) or not (one or source.target in _TAKEN_SOME):
        return None
    whole: fx.Node = source.args[0]
    value, given = whole.meta["val"], join.meta["val"]
    every = [pick.args[1] for pick in picks] == list(range(len(source.meta["val"])))
    along, joined = _axis(source, value.dim(), 1 if one else 2), _axis(join, given.dim(), 1)
    if not every or along != joined or value.dtype != given.dtype or value.numel() != given.numel():
        return None
    stacked = join.target is _aten.stack.default
    if any(part.target in _IN_ORDER for part in parts) or (one and not stacked):
        return whole if along == 0 else None
    return whole if one is stacked else None


def _axis(node: fx.Node, axes: int, place: int) -> int:
    axis: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return int(axis) % axes


class KeptSlices(TorchFunctionMode):
    """Records every slice [:n] of a parameter, of a buffer and of a plain tensor as an op, and before other indices."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: the traced ones, which hold fake tensors by now; plain tensors are real."""
        super().__init__()
        self._own = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__ and (id(args[0]) in self._own or type(args[0]) is torch.Tensor):
            args = _sliced(*args)
        return func(*args, **(kwargs or {}))


def _sliced(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Return the tensor cut by the slices [:n] of an index, and the index without them."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(type(item) in _SIMPLE for item in items):
        return tensor, index
    axis, missing = 0, tensor.dim() - sum(item is not None and item is not ... for item in items)
    for place, item in enumerate(items):
        if isinstance(item, slice) and type(item.stop) is int and item.start in (None, 0) and item.step in (None, 1):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, 0, item.stop)
            items[place] = slice(None)
        axis += missing if item is ... else item is not None
    return tensor, tuple(items)
