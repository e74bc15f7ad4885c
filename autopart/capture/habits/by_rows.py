"""`masked_scatter` by rows, told while torch.export traces.

It fills the places of a mask with the elements of its source, one after another over all rows: what a row gets depends
on the rows before it, unless each row of the mask has as many places as its row of the source has elements.  That is a
question to the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental import proxy_tensor

from autopart.capture.batch.questions import Operand, Step
from autopart.capture.reads.provenance import Elsewhere, Provenance

BY_ROWS = "by_rows"
"""Argument, in our graph, of a masked_scatter in which each row of the mask takes the elements of its own row."""

Ask = Callable[[tuple[Step, ...], Callable[..., Any], Any, str], Any]


def scatters_by_rows(tracer: Any, provenance: Provenance, rows: int | None, args: Any, ask: Ask) -> bool:
    """Whether a masked_scatter that is about to be traced goes row by row; asked of the batch where its mask depends on
    the inputs alone."""
    if len(args) != 3 or not rows:
        return False
    target, mask, source = args
    proxy = proxy_tensor.get_proxy_slot(mask, tracer, None)
    if proxy is None or target.dim() == 0 or target.shape[0] != rows or source.numel() % rows:
        return False
    try:
        steps = provenance.steps([proxy.proxy.node])
    except Elsewhere:
        return False
    read = partial(_each_row_full, row=tuple(target.shape[1:]), places=source.numel() // rows)
    return bool(ask(steps, read, (Operand(provenance.number(proxy.proxy.node)),), "masked_scatter"))


def _each_row_full(mask: torch.Tensor, row: tuple[int, ...], places: int) -> bool:
    """Whether each row of a mask that is spread over rows of this shape has so many places."""
    if mask.dim() < len(row) + 1:
        return False
    counts = mask.expand(mask.shape[0], *row).flatten(1).sum(1)
    return bool((counts == places).all())


def mark_by_rows(tracer: Any) -> None:
    """Say so of the op that was traced last."""
    node = next(iter(reversed(tracer.graph.nodes)))
    node.meta["custom"] = {**node.meta.get("custom", {}), BY_ROWS: True}


def is_by_rows(node: fx.Node) -> bool:
    """Whether it was said of an op, or of the one that it became."""
    return bool((node.meta.get("custom") or {}).get(BY_ROWS))
