"""The batch of a call: from the user's arguments to a batch taken apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from autopart.capture.batch.batch import Batch
from autopart.ir.errors import BatchError, UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


def first_batch(batch: Batch | None, *, sharded: bool) -> Batch:
    """Return the batch that the pipeline is planned for.  Raises BatchError if it is missing or a shard."""
    if batch is None or sharded:
        raise BatchError(
            "the first step of a pipe without a sample is given no whole batch",
            why="the pipeline is planned for it, on every rank",
            fix="pass sample=batch to compile, or the whole batch to the first step of every rank",
        )
    return batch


def one_batch(arguments: Arguments) -> Any:
    """Return the arguments of a call as one batch, None if this rank is given none."""
    args, kwargs = arguments
    if kwargs:
        return (args, kwargs) if args else kwargs
    if not args:
        raise BatchError("step was called without a batch", fix="pass the batch that the model takes")
    return args[0] if len(args) == 1 else args


def refuse_target(model: torch.nn.Module, batch: Any) -> None:
    """Raise UsageError for a pair given to `predict` if the model takes one argument: the second is a target."""
    if not isinstance(batch, tuple) or len(batch) != 2 or isinstance(batch[1], Mapping):
        return
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError as error:
        raise UsageError(
            "predict was given a pair that the model does not take",
            why=f"{error}; pairs of inputs and target are for step and eval_loss",
            fix="leave the target out: pipe.predict(inputs)",
        ) from None
