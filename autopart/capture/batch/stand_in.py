"""A stand-in for a batch that a rank is not given, made from another rank's description.

A stage that reads no input only needs what its program follows from: shapes, types, Python values and the answers to
what the model's Python asks about the batch's numbers.  A description is plain JSON, so that nothing received from
another rank is executed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.capture.batch.batch import Batch
from autopart.ir.errors import BatchError

_AS_THEY_ARE = (type(None), bool, int, float, str)


def describe(batch: Batch) -> dict[str, Any]:
    """Return what `stand_in` reads.  Raises BatchError for containers that cannot be described."""
    try:
        spec = pytree.treespec_dumps(batch.spec)
    except NotImplementedError as error:
        raise BatchError(
            "the batch cannot be described to the ranks that were given none",
            why=(str(error).splitlines() or [""])[0],
            fix="pass tensors in tuples, lists and dicts, or give every rank the batch",
        ) from error
    leaves = zip(batch.leaves, batch.splits, strict=True)
    return {
        "spec": spec,
        "leaves": [_described(leaf, split=split) for leaf, split in leaves],
        "keys": list(batch.keys),
        "names": list(batch.names),
        "rows": batch.rows,
        "answers": _packed(batch.answers or ()),
    }


def stand_in(described: dict[str, Any]) -> Batch:
    """Return a batch of the same signature and rows, of zeros that take no memory."""
    leaves = [_leaf(content) for content in described["leaves"]]
    return Batch(
        tuple(leaf for leaf, _ in leaves),
        tuple(described["keys"]),
        tuple(described["names"]),
        tuple(split for _, split in leaves),
        pytree.treespec_loads(described["spec"]),
        described["rows"],
        _unpacked(described["answers"]),
        stands_in=True,
    )


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


def _described(leaf: Any, *, split: bool) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        return {"shape": list(leaf.shape), "dtype": _word(leaf.dtype), "split": split}
    return {"value": _packed(leaf)}


def _leaf(content: dict[str, Any]) -> tuple[Any, bool]:
    if "shape" in content:
        return _zeros(content["shape"], getattr(torch, content["dtype"])), content["split"]
    return _unpacked(content["value"]), False


def _packed(value: Any) -> Any:
    """Return a Python value in a form in which JSON keeps its type."""
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_packed(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return {"dtype": _word(value)} if isinstance(value, torch.dtype) else {"device": str(value)}


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("tuple", "list"):
        items = [_unpacked(item) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    return getattr(torch, content) if kind == "dtype" else torch.device(content)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
