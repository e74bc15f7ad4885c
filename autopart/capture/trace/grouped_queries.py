"""Attention with fewer keys than queries: the kernel reads each key for its group of queries.

Models repeat keys and values to the number of query heads where attention has a mask.  Once the mask is gone
(`reads.masks`), the copies, and the sums over them in the backward, are work for nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_LARGEST_HEAD = 256
"""Entries of a head up to which the kernels take groups."""


def group_queries(graph: fx.Graph) -> None:
    """Let attention without mask take keys and values that are only repeated for it.  O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=_aten.scaled_dot_product_attention.default):
        query, key, value = node.args[:3] if len(node.args) >= 3 else (None, None, None)
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        if mask is not None or node.kwargs.get("enable_gqa") or not _has_kernel(query):
            continue
        (keys, key_cast), (values, value_cast) = _uncast(key), _uncast(value)
        keys, values = _repeated(keys), _repeated(values)
        if keys is not None and values is not None and _heads(keys) == _heads(values):
            with graph.inserting_before(node):
                node.args = (query, _cast(keys, key_cast), _cast(values, value_cast), *node.args[3:])
            node.kwargs = {**node.kwargs, "enable_gqa": True}


def _uncast(node: Any) -> tuple[Any, fx.Node | None]:
    """Return what a cast was made of, and the cast; the node itself and None if it is not a cast.

    Under autocast the keys are cast after they were repeated; cast before, they are the same numbers.
    """
    if isinstance(node, fx.Node) and node.target is _aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        return node.args[0], node
    return node, None


def _cast(node: fx.Node, like: fx.Node | None) -> fx.Node:
    """Return a node cast as another was; the node itself if that is None."""
    if like is None:
        return node
    made = node.graph.call_function(like.target, (node,), dict(like.kwargs))  # type: ignore[arg-type]
    made.meta.update(like.meta, val=node.meta["val"].to(like.meta["val"].dtype))
    return made


def _has_kernel(query: Any) -> bool:
    """Return whether the fused kernel of the device takes groups: on CUDA the one for half precision does."""
    if not isinstance(query, fx.Node) or query.meta["val"].dim() != 4 or query.meta["val"].shape[-1] > _LARGEST_HEAD:
        return False
    return query.meta["val"].device.type != "cuda" or query.meta["val"].dtype in (torch.float16, torch.bfloat16)


def _repeated(node: Any) -> fx.Node | None:
    """Return (rows, heads, tokens, entries) of which each head is repeated in place, next to itself, to make a node."""
    if not isinstance(node, fx.Node) or node.meta["val"].dim() != 4:
        return None
    found: Any = None
    if node.target is _aten.repeat_interleave.self_int and node.args[2:] == (1,):
        found = node.args[0]
    elif node.target is _aten.reshape.default:
        wide = node.args[0]
        if isinstance(wide, fx.Node) and wide.target is _aten.expand.default:
            narrow = wide.args[0]
            if isinstance(narrow, fx.Node) and narrow.target is _aten.unsqueeze.default and narrow.args[1] in (2, -3):
                found = narrow.args[0]
    if not isinstance(found, fx.Node) or found.meta["val"].dim() != 4:
        return None
    (rows, heads, *rest), repeated = found.meta["val"].shape, tuple(node.meta["val"].shape)
    whole = repeated[0] == rows and repeated[1] % heads == 0 and repeated[2:] == tuple(rest)
    return found if whole and math.prod(repeated) > found.meta["val"].numel() else None


def _heads(node: fx.Node) -> int:
    return int(node.meta["val"].shape[1])
