"""A stand-in for a batch that a rank is not given.

A stage that reads no input only needs what its program follows from: shapes, types, Python values and the answers to
what the model's Python asks about the batch's numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopart.batch.batch import Batch
from autopart.rng import memory_order


def with_rows(batch: Batch, rows: int) -> Batch:
    """Return a stand-in with this number of rows."""

    def resize(tensor: torch.Tensor, split: bool) -> torch.Tensor:
        return tensor[:1].expand(rows, *tensor.shape[1:]) if split else tensor

    return batch if batch.rows is None else batch.changed(resize, rows)


def emptied(batch: Batch) -> Batch:
    """Return a stand-in of the same signature and rows, of zeros that take the memory of a row where they do not lie in
    the order of their axes, and else none."""
    return replace(batch.changed(_zeros, batch.rows), answers=batch.answers or (), stands_in=True)


def _zeros(tensor: torch.Tensor, split: bool) -> torch.Tensor:
    order = memory_order(tensor)
    if order == tuple(range(tensor.dim())):
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    own = (1, *tensor.shape[1:]) if split else tensor.shape
    return torch.empty_permuted(own, order, dtype=tensor.dtype).zero_().expand(tensor.shape)
