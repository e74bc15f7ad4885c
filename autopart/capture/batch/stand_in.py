"""A stand-in for a batch that a rank is not given, made from another rank's description.

A stage that reads no input only needs what its program follows from: shapes, types, Python values and the answers to
what the model's Python asks about the batch's numbers.
"""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.capture.batch.batch import Batch
from autopart.ir.errors import BatchError


def describe(batch: Batch) -> list[str]:
    """Return texts that `stand_in` reads.  Raises BatchError for containers that cannot be described."""
    try:
        spec = pytree.treespec_dumps(batch.spec)
    except NotImplementedError as error:
        raise BatchError(
            "the batch cannot be described to the ranks that were given none",
            why=(str(error).splitlines() or [""])[0],
            fix="pass tensors in tuples, lists and dicts, or give every rank the batch",
        ) from error
    return [spec, base64.b64encode(pickle.dumps(replace(emptied(batch), spec=None))).decode()]


def stand_in(described: list[str]) -> Batch:
    """Return a batch of the same signature and rows, of zeros that take no memory."""
    spec, content = described
    found: Any = pickle.loads(base64.b64decode(content))
    assert isinstance(found, Batch)
    return replace(found, spec=pytree.treespec_loads(spec))


def with_rows(batch: Batch, rows: int) -> Batch:
    """Return a stand-in with this number of rows."""

    def resize(tensor: torch.Tensor, split: bool) -> torch.Tensor:
        return _zeros((rows, *tensor.shape[1:]), tensor.dtype) if split else tensor

    return batch if batch.rows is None else batch.changed(resize, rows)


def emptied(batch: Batch) -> Batch:
    """Return a stand-in for a batch of this rank."""
    answers = batch.answers or ()
    return replace(batch.changed(lambda t, _: _zeros(t.shape, t.dtype), batch.rows), answers=answers, stands_in=True)


def _zeros(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(tuple(shape))
