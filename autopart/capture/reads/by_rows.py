"""`masked_scatter` that works row by row, recognised while torch.export traces.

The op fills the places of a mask with the elements of its source, in order over all rows: what a row gets depends on
the rows before it, unless each row of the mask has as many places as its row of the source has elements.  The batch is
asked whether that holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

BY_ROWS = "by_rows"
"""Argument, in our graph, of a masked_scatter in which each row of the mask takes the elements of its own row."""


def scatters_by_rows(mode: Any, rows: int | None, args: Any, ask: Callable[..., Any]) -> bool:
    """Return whether a masked_scatter that is about to be traced works row by row in this batch.

    ask: as in `Sizes`; a mask that depends on more than the inputs cannot be asked about.
    """
    if len(args) != 3 or not rows:
        return False
    target, mask, source = args
    if target.dim() == 0 or target.shape[0] != rows or source.numel() % rows:
        return False
    read = partial(_each_row_full, row=tuple(target.shape[1:]), places=source.numel() // rows)
    return bool(ask(mode, mask, read, "masked_scatter"))


def _each_row_full(mask: torch.Tensor, row: tuple[int, ...], places: int) -> bool:
    """Return whether each row of a mask, broadcast to rows of this shape, has this number of places."""
    if mask.dim() < len(row) + 1:
        return False
    counts = mask.expand(mask.shape[0], *row).flatten(1).sum(1)
    return bool((counts == places).all())


def mark_by_rows(tracer: Any) -> None:
    """Mark the op that was traced last as working row by row."""
    node = next(iter(reversed(tracer.graph.nodes)))
    node.meta["custom"] = {**node.meta.get("custom", {}), BY_ROWS: True}


def is_by_rows(node: fx.Node) -> bool:
    """Return whether an op, or the op that it was made of, was marked as working row by row."""
    return bool((node.meta.get("custom") or {}).get(BY_ROWS))
