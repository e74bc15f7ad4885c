"""Ranks in step: before every collective call, each rank says which call it makes, with what, and its number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.errors import BatchError, UsageError
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.session.ranks.agreement import raise_first

NAMES = (
    "step", "eval_loss", "predict", "gradients", "clip_grad_norm_", "state_dict", "sync_model", "adopt", "timeline",
    "close", "verify", "compile",
)  # fmt: skip


ROOM = 128
"""How many numbers about its batch a rank can say with its call."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What all ranks say of a call.  signature: a digest of the batch's; rows: of the batch of each rank; missing:
    whether some rank was given no batch; said: what each rank says of its batch, by rank; () where some rank that has
    one says nothing."""

    signature: float
    rows: tuple[int, ...]
    missing: bool
    said: Sequence[Sequence[float]]


class Calls:
    """The collective calls of one rank, counted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    def enter(
        self,
        name: str,
        failure: BaseException | None = None,
        *,
        needed: Sequence[int] = (),
        signature: str = "",
        version: str = "",
        rows: int = 0,
        scale: float = 1.0,
        sharded: bool = False,
        said: Sequence[float] | None = None,
    ) -> Heard:
        """Go on once every rank makes this call with the same; returns what all say.  Collective.

        failure: what went wrong on this rank, which all ranks then raise.  needed: the ranks that need a batch, of
        shards the first of them at least.  signature: of this rank's batch, "" where it was given none; version: of
        its model (`CaptureCache.version`); rows: of its batch; scale: of its loss; sharded: whether ranks give rows of
        their own; said: up to `ROOM` numbers about its batch, None where they are not known yet.  Raises UsageError on
        all ranks when they make different calls, and BatchError when batches, or changes of the model, differ, or when
        one that needs a batch has none.
        """
        self._count += 1
        set_activity(f"call {self._count}: {name}")
        mine = [
            float(NAMES.index(name)), float(self._count), float(failure is not None), digest_of(signature),
            digest_of(version), float(rows), scale, float(sharded), float(said is not None),
            *(said or ()), *[0.0] * (ROOM - len(said or ())),
        ]  # fmt: skip
        found = self._world.gather_numbers(mine)
        for rank, row in enumerate(found):
            if row[:2] != found[0][:2]:
                raise self._world.known(_different_calls(rank, found[0], row))
        if any(row[2] for row in found):
            raise_first(self._world, failure, "preparing the batch")
        holders = [rank for rank, row in enumerate(found) if row[3]]
        absent = [rank for rank in (needed[:1] if sharded else needed) if rank not in holders]
        if absent:
            raise self._world.known(_without_batch(absent, needed))
        first = needed[0] if needed else 0
        for rank, row in enumerate(found):
            compared = [*_ALIKE, *((3,) if rank in holders else ()), *(() if sharded or not row[3] else (5,))]
            if any(row[place] != found[first][place] for place in compared):
                changes = self._world.gather_text(version) if found[first][4] != row[4] else []
                raise self._world.known(_different_given(first, rank, found[first], row, changes))
        all_said = [row[_HEAD:] for row in found] if all(row[8] for row in found) else ()
        return Heard(found[first][3], tuple(int(row[5]) for row in found), len(holders) < len(found), all_said)


_HEAD = 9
"""How many numbers every rank says of every call."""
_ALIKE = (4, 6, 7)
"""Places of what is alike on all ranks, whatever they were given."""


def digest_of(text: str) -> float:
    """52 bits of a hash; 0 of no text."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 12) if text else 0.0


def _different_calls(rank: int, first: list[float], other: list[float]) -> UsageError:
    return UsageError(
        f"ranks 0 and {rank} make different calls",
        why=f"rank 0 calls {NAMES[int(first[0])]} as its call number {int(first[1])}, rank {rank} calls "
        f"{NAMES[int(other[0])]} as its number {int(other[1])}",
        fix="let every rank make the same calls in the same order; what only rank 0 does with a result comes after",
    )


def _without_batch(absent: list[int], needed: Sequence[int]) -> BatchError:
    return BatchError(
        f"rank {absent[0]} was given no batch",
        why=f"the model's inputs enter on rank{'s' * (len(needed) > 1)} {', '.join(map(str, needed))}",
        fix="pass the batch on every rank, or where pipe.needs_data is True",
    )


def _different_given(
    first: int, rank: int, one: list[float], other: list[float], versions: Sequence[str]
) -> BatchError:
    if one[4] != other[4]:
        told = [f"rank {r}: {versions[r].partition(' ')[2] or 'no change'}" for r in (first, rank)]
        return BatchError(
            f"the models of ranks {first} and {rank} were changed in different ways since they were compiled",
            why=f"their last changes are, on {'; on '.join(told)}",
            fix="make every change of the model on all ranks, before the same step",
        )
    if one[6] != other[6]:
        return BatchError(
            f"the loss is scaled by {one[6]:g} on rank {first} and by {other[6]:g} on rank {rank}",
            why="pipe.scaler was changed, or loaded, on some ranks alone",
            fix="load the same state on every rank",
        )
    if one[7] != other[7]:
        return BatchError(
            f"sharded= differs between ranks {first} and {rank}",
            why="either every rank is given the whole batch, or each its own rows",
            fix="pass the same on every rank, also where the batch is None",
        )
    return BatchError(
        f"ranks {first} and {rank} were given batches of different shapes",
        why=f"{int(one[5])} and {int(other[5])} rows, or other inputs",
        fix="give every rank the same batch (rank 0's data is what is used), or its own rows with sharded=True",
    )
