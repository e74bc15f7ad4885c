"""Ranks in step: before every collective call, each rank says which call it makes, with what, and its number."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from autopart.ir.errors import BatchError, UsageError
from autopart.runtime.activity import set_activity
from autopart.runtime.world import World
from autopart.session.agreement import raise_first

NAMES = (
    "step", "eval_loss", "predict", "gradients", "clip_grad_norm_", "state_dict", "sync_model", "adopt", "timeline",
    "close", "verify", "compile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """What a rank was given.  signature: of its batch; version: of its model (`CaptureCache.version`); rows: of its
    batch; scale: of its loss."""

    signature: str = ""
    version: str = ""
    rows: int = 0
    scale: float = 1.0


_NOTHING = Given()


class Calls:
    """The collective calls of one rank, counted."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    def enter(self, name: str, given: Given = _NOTHING, failure: BaseException | None = None) -> None:
        """Go on once every rank makes this call with the same.  Collective.

        failure: what went wrong on this rank, which all ranks then raise.  Raises UsageError on all ranks when they
        make different calls, and BatchError when batches, or changes of the model, differ.
        """
        self._count += 1
        set_activity(f"call {self._count}: {name}")
        mine = [
            float(NAMES.index(name)), float(self._count), float(failure is not None), _digest(given.signature),
            _digest(given.version), float(given.rows), given.scale,
        ]  # fmt: skip
        rows = self._world.gather_numbers(mine)
        for rank, row in enumerate(rows):
            if row[:2] != rows[0][:2]:
                raise self._world.known(_different_calls(rank, rows[0], row))
        if any(row[2] for row in rows):
            raise_first(self._world, failure, "preparing the batch")
        for rank, row in enumerate(rows):
            if row[3:] != rows[0][3:]:
                raise self._world.known(_different_given(rank, rows[0], row))


def _digest(text: str) -> float:
    return float(zlib.crc32(text.encode()))


def _different_calls(rank: int, first: list[float], other: list[float]) -> UsageError:
    return UsageError(
        f"ranks 0 and {rank} make different calls",
        why=f"rank 0 calls {NAMES[int(first[0])]} as its call number {int(first[1])}, rank {rank} calls "
        f"{NAMES[int(other[0])]} as its number {int(other[1])}",
        fix="let every rank make the same calls in the same order; what only rank 0 does with a result comes after",
    )


def _different_given(rank: int, first: list[float], other: list[float]) -> BatchError:
    if first[4] != other[4]:
        return BatchError(
            f"the models of ranks 0 and {rank} were changed in different ways since they were compiled",
            why="an attribute, a training flag or a requires_grad flag differs, or was changed on one of them alone",
            fix="make every change of the model on all ranks, before the same step",
        )
    if first[6] != other[6]:
        return BatchError(
            f"the loss is scaled by {first[6]:g} on rank 0 and by {other[6]:g} on rank {rank}",
            why="pipe.scaler was changed, or loaded, on some ranks alone",
            fix="load the same state on every rank",
        )
    return BatchError(
        f"ranks 0 and {rank} were given batches of different shapes",
        why=f"{int(first[5])} and {int(other[5])} rows, or other inputs",
        fix="give every rank the same batch; rank 0's data is what is used",
    )
