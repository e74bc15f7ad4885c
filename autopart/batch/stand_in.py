"""A stand-in for a batch that a rank is not given.

A stage that reads no input only needs what its program follows from: shapes, types, Python values and the answers to
what the model's Python asks about the batch's numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopart.batch.batch import Batch


def with_rows(batch: Batch, rows: int) -> Batch:
    """Return a stand-in with this number of rows."""

    def resize(tensor: torch.Tensor, split: bool) -> torch.Tensor:
        return _zeros((rows, *tensor.shape[1:]), tensor.dtype) if split else tensor

    return batch if batch.rows is None else batch.changed(resize, rows)


def emptied(batch: Batch) -> Batch:
    """Return a stand-in of the same signature and rows, of zeros that take no memory."""
    answers = batch.answers or ()
    return replace(batch.changed(lambda t, _: _zeros(t.shape, t.dtype), batch.rows), answers=answers, stands_in=True)


def _zeros(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(tuple(shape))
