"""The batch of a call: whole, missing on some ranks, or in shards.

A shard holds the rows of one replica of the first stage: its window of the first micro-batch, then of the second, and
so on.  The batch of a step over shards is, micro-batch by micro-batch, the next rows of each shard in the order of the
replicas (`rows_of_shards`).
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopart.batch.batch import Batch, split_rows
from autopart.batch.stand_in import emptied
from autopart.capture import Captured
from autopart.ir.errors import BatchError, RefusedError, UsageError
from autopart.ir.plan import Decision
from autopart.ir.shares import Division, parts
from autopart.runtime.group.world import World
from autopart.runtime.watch.effects import first_line
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.ranks.call_sync import digest_of
from autopart.session.step.parts import fitting_cut, micro_cut

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


def shared_stand_in(world: World, batch: Batch | None, source: int, signature: float) -> Batch:
    """Return an empty batch of the kind that rank `source` was given, for ranks without one.  Collective.

    batch: of this rank.  signature: digest of the batch's signature.  Raises BatchError on all ranks if the batch
    cannot be described.
    """

    def described() -> Batch:
        assert batch is not None
        own = emptied(batch)
        try:
            pickle.dumps(own)
        except Exception as error:
            raise BatchError(
                "the batch cannot be described to the ranks that were given none",
                why=first_line(error),
                fix="pass tensors in tuples, lists and dicts, or give every rank the batch",
            ) from error
        return own

    known = from_rank(world, source, "describing the batch", described)
    with together(world, "describing the batch"):
        if digest_of(repr(known.signature())) != signature:
            raise BatchError(
                "the batch cannot be described to the ranks that were given none",
                why="the batch that is made from its description is of another kind",
                fix="give every rank the batch",
            )
    return known


def own_rows(micro_rows: Sequence[int], divided: Division, replica: int) -> tuple[int, ...]:
    """Return the places in the whole batch of the rows of one replica of the first stage, in the order of its shard.
    divided: how the replicas of that stage divide micro-batches."""
    found: list[int] = []
    start = 0
    for micro, rows in enumerate(micro_rows):
        window = divided.windows(micro, rows)[replica]
        found.extend(range(start + window.first, start + window.end))
        start += rows
    return tuple(found)


def rows_of_shards(shards: Sequence[int], decision: Decision) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a batch in shards of these sizes.

    Shards with the sizes of `own_rows` are cut like the whole batch.  Else they must be even: each replica has an equal
    part of every micro-batch, as a sampler deals rows.  Raises BatchError for other shards.
    """
    planned, divided = decision.micro_rows, decision.stages[0].division
    replicas, total = len(shards), sum(shards)
    least = min(shards)
    tried = [micro_cut(total, planned)] if total else []
    if least:
        even = [replicas * rows for rows in split_rows(least, min(len(planned), least))]
        tried.append((*even[:-1], even[-1] + total - replicas * least))
    for micro_rows in tried:
        if _sizes(micro_rows, divided) == tuple(shards):
            return micro_rows
    expected = _sizes(tried[0], divided) if tried else ()
    raise BatchError(
        f"shards of {_listed(shards)} rows do not make a batch",
        why=f"of {total} rows, the replicas of the first stage have {_listed(expected)}",
        fix="give each the same number of rows, or those that pipe.data_rows(rows of the whole batch) returns",
    )


def _sizes(micro_rows: Sequence[int], divided: Division) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(parts(divided, micro, rows) for micro, rows in enumerate(micro_rows)), strict=True)))


def _listed(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def require_no_questions(captured: Captured) -> None:
    """Raise RefusedError if the model's Python reads numbers of its batch, which a shard does not have."""
    if captured.questions is not None and captured.questions.asked_by_python:
        raise RefusedError(
            "the model's Python reads numbers of the whole batch, and each replica was given only its own rows",
            where=captured.questions.asked_by_python[0].where,
            why="replicas would take different branches from those of the whole batch",
            fix="give the ranks where pipe.needs_data is True the whole batch, or compute with the tensor instead",
        )


def micro_rows(
    batch: Batch, shards: Sequence[int], decision: Decision, fitting: range | None = None
) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a batch.  shards: rows of each shard, () for a whole batch.  fitting: rows
    that parts of a whole batch may have, where the model runs another program on others (`fitting_cut`).

    Raises BatchError for shards that do not fit, and for a batch without rows that is to be cut."""
    planned = decision.micro_rows
    if shards:
        return rows_of_shards(shards, decision)
    if batch.rows is not None:
        return micro_cut(batch.rows, planned) if fitting is None else fitting_cut(batch.rows, decision, fitting)
    if len(planned) > 1:
        raise BatchError(
            f"the batch has no rows to cut into {len(planned)} micro-batches",
            why="none of its tensors has an axis",
            fix="pass a batch like the sample that was planned for",
        )
    return (1,)
