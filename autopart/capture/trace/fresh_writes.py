"""Writes to memory that the forward has just made, as ops without a write.

A mixture of experts inverts the order of its tokens by `back = torch.empty_like(order); back[order] = arange`.  What
is written to has been read by nothing before and shares its memory with nothing, so the op that returns the new values
instead is the same program: torch's functionalization makes it too, but traces the whole model again for it.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.passes.ops.row import CREATION
from autopart.passes.ops.table import row_of

_aten = torch.ops.aten
_WITHOUT_WRITE: dict[Any, Any] = {
    _aten.index_put_.default: _aten.index_put.default,
    _aten.scatter_.src: _aten.scatter.src,
    _aten.scatter_.value: _aten.scatter.value,
}
"""Ops whose results always have the shape and the type of what they write to."""


def without_fresh_writes(graph: fx.Graph) -> bool:
    """Replace each write to a tensor that an op has made and nothing has read yet; return whether there was one.

    Afterwards everything that read the tensor reads the result of the op.  Other writes stay.  O(nodes).
    """
    unread, found = set[fx.Node](), False
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        written, others = node.args[0] if node.args else None, pytree.tree_leaves((node.args[1:], node.kwargs))
        fresh = isinstance(written, fx.Node) and written in unread and written not in others
        unread.difference_update(node.all_input_nodes)
        if fresh and node.target in _WITHOUT_WRITE:
            assert isinstance(written, fx.Node)
            node.target, found = _WITHOUT_WRITE[node.target], True
            written.replace_all_uses_with(node, delete_user_cb=functools.partial(operator.is_not, node))
            unread.add(node)
        elif _makes_memory(node.target):
            unread.add(node)
    return found


def _makes_memory(target: Any) -> bool:
    op = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    return op and row_of(str(target)).family == CREATION
