"""The batch of a call: from the user's arguments to a batch taken apart."""

from __future__ import annotations

from typing import Any

from autopart.capture.batch.batch import Batch
from autopart.ir.errors import BatchError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""


def first_batch(batch: Batch | None, *, sharded: bool) -> Batch:
    """The batch of a step that plans the pipeline.  Raises BatchError where that is not a whole batch."""
    if batch is None or sharded:
        raise BatchError(
            "the first step of a pipe without a sample is given no whole batch",
            why="the pipeline is planned for it, on every rank",
            fix="pass sample=batch to compile, or the whole batch to the first step of every rank",
        )
    return batch


def one_batch(arguments: Arguments) -> Any:
    """The batch that the arguments of a call are, None where this rank is given none."""
    args, kwargs = arguments
    if kwargs:
        return (args, kwargs) if args else kwargs
    if not args:
        raise BatchError("step was called without a batch", fix="pass the batch that the model takes")
    return args[0] if len(args) == 1 else args
