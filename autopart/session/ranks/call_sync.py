"""The exchange before every collective call: each rank sends which call it makes, its number, and what it was given."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from autopart.ir.errors import BatchError, RunError, UsageError
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.runtime.watch.effects import first_line
from autopart.session.ranks.agreement import raise_first
from autopart.session.ranks.listener import Listener

NAMES = (
    "step", "eval_loss", "predict", "gradients", "clip_grad_norm_", "state_dict", "sync_model", "adopt", "timeline",
    "close", "compile", "train", "flush", "full_parameters", "save", "load", "save_pretrained", "replan", "metrics",
    "freeze",
)  # fmt: skip
END = "the end of the batches"
"""Stands for the signature of a batch where the batches of a rank have ended."""
STEP_FAILED = "a step failed"
_AS_BEFORE = "Gradients and buffers are as before it"
_OF_A_LISTENER = 2.0
"""Says, with the place of the listener added, that it returned a rank's failure; 1 is a failure of the call."""
_ROOM = 128  # counts of a batch that fit into the exchange of a call
_ALIKE = (4, 6, 7, 9)  # places, in what ranks tell, of what must be equal on all: model version, scale, sharded, step
_SAME = (*_ALIKE, 8)
"""As `_ALIKE`, and whether the batches have ended."""
_CALLS, _RANKS = 1 << 5, 1 << 20
"""More than there are names of calls, and ranks: a call, its number and a rank fit into a double."""
_NONE = -math.inf
"""Sent for a number that a rank does not have, where the largest of all ranks counts."""


class Given(NamedTuple):
    """What the ranks were given for a call.

    signature: digest of the batch's signature.  rows: of the batch; of shards, those of the largest.  shards: rows of
    the batch of each rank that needs one, () if each is given all.  missing: whether a rank has no batch.  counts: of
    the first rank that needs the batch, () if some rank has not counted.  ended, loss: whether batches have ended, and
    a sum over ranks (`Calls.enter`).
    """

    signature: float
    rows: int
    shards: tuple[int, ...]
    missing: bool
    counts: Sequence[float]
    ended: bool
    loss: float


class Calls:
    """The collective calls of one rank, numbered, and whether one of them has failed.

    listeners: what hears of them, alike on every rank.  under_way: whether a call runs now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._failure = ""
        self.under_way = False
        self.listeners: list[Listener] = []

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
        counts: Sequence[float] | None = None,
        ended: bool = False,
        loss: float = 0.0,
        step: int = 0,
    ) -> Callable[[], Given]:
        """Tell every rank of this call, without waiting; return a function that waits until all of them make it, and
        compares what they were given.  Collective.

        failure: error of this rank, which all ranks then raise.  needed: ranks that need a batch; of shards the first
        of them at least.  signature, rows: of this rank's batch, "" and 0 if it has none.  version: of its model
        (`CaptureCache.version`).  scale: of the loss.  sharded: whether ranks have rows of their own.  counts: of this
        rank's batch, None if not counted yet.  ended: whether its batches have.  loss: what it adds to `Given.loss`.
        step: its number.

        Ranks learn the largest and the smallest of what must be equal, so that what each does grows with log(ranks);
        only if these differ do they tell each other all, to name who.  The function raises on all ranks: UsageError
        for different calls, BatchError for different batches, different changes of the model, or a batch that is
        missing.
        """
        if counts is not None and len(counts) > _ROOM:
            counts = None
        failed = float(failure is not None)
        for place, error in enumerate([each.before_call(name) for each in self.listeners]):
            if failure is None and error is not None:
                failure, failed = error, _OF_A_LISTENER + place
        self._count += 1
        doing = f"call {self._count}: {name}"
        set_activity(doing)
        told = [
            float(NAMES.index(name)), float(self._count), failed, digest_of(signature), digest_of(version), float(rows),
            scale, float(sharded), float(ended), float(step),
        ]  # fmt: skip
        turn = needed.index(self._world.rank) if self._world.rank in needed else None
        counted = [(each, each.counted()) for each in self.listeners]
        done = [number if name == "step" else _NONE for _, numbers in counted for number in numbers]
        mine = [*done, *_other_sign(done), *_largest(self._world.rank, told, turn, counts)]
        reduced = self._world.begin_reducing(mine, [loss])

        def settled() -> Given:
            set_activity(doing)  # a step may have begun meanwhile
            found, count = reduced(), len(done)
            given = self._settled(told, failure, needed, version, found[2 * count :])
            both = zip(found[:count], _other_sign(found[count : 2 * count]), strict=True)
            for each, numbers in counted if self._world.rank == 0 else ():
                each.compare([next(both) for _ in numbers])
            return given

        return settled

    def _settled(
        self,
        told: Sequence[float],
        failure: BaseException | None,
        needed: Sequence[int],
        version: str,
        found: list[float],
    ) -> Given:
        """Return what the ranks were given, or raise how they differ.  told: what this rank did, with its failure.
        found: the largest of all ranks.  Collective."""
        most, least, (failing, missing, absent, uncounted) = found[2:10], found[10:18], found[18:22]
        *alike, alike_rows, same = [high in (-low, _NONE) for high, low in zip(most, least, strict=True)]
        if (different := _different_calls(int(found[0]), int(-found[1]))) is not None:
            raise different if any(each.late for each in self.listeners) else self._world.known(different)
        sharded, (ended, signature, rows) = bool(told[7]), most[4:7]
        if failing or absent or not (all(alike) and (alike_rows or sharded)):
            self._compared(self._world.gather_numbers(told), failure, needed, version, sharded=sharded)
        if not same:
            raise self._world.known(different_batches(needed))
        shards = [rows] * len(needed) if sharded else []
        if sharded and not alike_rows:
            shards = self._world.reduce_numbers([told[5] if r == self._world.rank else _NONE for r in needed])
        counts = () if uncounted else found[22:-1]
        given = max(signature, 0.0), int(max(rows, 0.0)), tuple(map(int, shards))
        return Given(*given, bool(missing), counts, bool(ended), found[-1])

    def _compared(
        self,
        found: list[list[float]],
        failure: BaseException | None,
        needed: Sequence[int],
        version: str,
        *,
        sharded: bool,
    ) -> None:
        """Raise how what the ranks were given differs.  found: what each rank told.  Collective."""
        for place in {int(row[2] - _OF_A_LISTENER) for row in found if row[2] >= _OF_A_LISTENER}:
            self.listeners[place].told()
        if any(row[2] for row in found):
            raise_first(self._world, failure, "preparing the batch")
        holders = [rank for rank, row in enumerate(found) if row[3]]
        for rank in needed[:1] if sharded else needed:
            if rank not in holders:
                raise self._world.known(
                    BatchError(
                        f"rank {rank} was given no batch",
                        why=f"the model's inputs enter on rank{'s' * (len(needed) > 1)} {', '.join(map(str, needed))}",
                        fix="pass the batch on every rank, or where pipe.needs_data is True",
                    )
                )
        first = needed[0] if needed else 0
        for rank, row in enumerate(found):
            compared = [*_ALIKE, *((3,) if rank in holders else ()), *(() if sharded or not row[3] else (5,))]
            if any(row[place] != found[first][place] for place in compared):
                changes = self._world.gather_objects(version) if found[first][4] != row[4] else []
                raise self._world.known(_different_given(first, rank, found[first], row, changes))
        ended = [bool(row[8]) for row in found]
        if any(ended) and not all(ended):
            raise self._world.known(ended_early(ended.index(True), ended.index(False)))

    @contextmanager
    def collective(self, doing: str) -> Iterator[None]:
        """Tell all ranks, within a second, of an error of the body that not all of them raise alike, and end what they
        wait for.  Raises the error that came first, on whichever rank; RunError if a call has failed before."""
        self.require_healthy()
        outer, self.under_way = self.under_way, True
        try:
            yield
        except BaseException as error:
            first = self._world.end(error)
            if self._world.size > 1 and not self._world.is_known(error):
                self.note_failure(doing, first)
                for each in self.listeners:
                    each.failed(doing, first)
            if first is error:
                raise
            raise first from None  # the broken connection only follows from it
        finally:
            self.under_way = outer

    @contextmanager
    def running(self, doing: str) -> Iterator[None]:
        """Note any failure of the body: messages of it may still be under way, so nothing more may be sent.  An error
        that all ranks raise before the first message is none."""
        try:
            yield
        except BaseException as error:
            if not self._world.is_known(error):
                self.note_failure(doing, error)
            raise

    def closing(self) -> Exception | None:
        """Let every listener finish; return the first error, which all ranks find: their weights still come together.
        Collective if healthy; raises UsageError if ranks make different calls."""
        first: Exception | None = None
        for each in self.listeners:
            try:
                each.closing(healthy=self.healthy)
            except UsageError:
                raise
            except Exception as error:
                first = first or error
        return first

    def note_failure(self, doing: str, error: BaseException) -> None:
        """Note a failure while ranks were running; the first one counts."""
        if not self._failure:
            self._failure = f"{doing}: {type(error).__name__}: {first_line(error)}"

    @property
    def healthy(self) -> bool:
        """Whether nothing failed here while ranks were running."""
        return not self._failure

    def require_healthy(self) -> None:
        """Raise RunError when something failed here while ranks were running."""
        if self._failure:
            left = next((each.leaves for each in self.listeners if each.leaves), _AS_BEFORE)
            raise RunError(
                "the pipeline has failed and takes no further step",
                why=f"{self._failure}; the ranks are no longer connected.  {left}",
                fix="pipe.local_state_dict() still returns this rank's part of the weights; then close the pipe on "
                "every rank, load a state, and compile the model again",
            )

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks of an error of the user's own code, perhaps on this rank alone; the pipe ends."""
        if self._world.size > 1 and self.healthy and not self._world.is_known(error):
            self.note_failure("the script", error)
            self._world.fail(error)


def _largest(rank: int, told: Sequence[float], place: int | None, counts: Sequence[float] | None) -> list[float]:
    """Return the numbers of which all ranks learn the largest: the last call and the first, with the lowest rank that
    makes it; what should be equal, and the same with the other sign, which gives the smallest; flags; then the counts
    of the first rank that needs the batch.

    told: of this rank.  place: among the ranks that need a batch, None if it does not.  counts: of this rank."""
    name, number, failed, signature, _, rows, _, sharded, _, _ = told
    call, holds, needs = (number * _CALLS + name) * _RANKS, bool(signature), place is not None
    shared = [
        *(told[each] for each in _SAME),
        signature if holds else _NONE,
        rows if (needs if sharded else holds) else _NONE,
        counts[0] if needs and counts else _NONE,
    ]
    wanted = place == 0 if sharded else needs
    flags = [failed, float(not holds), float(wanted and not holds), float(counts is None)]
    own = [*(counts or ()), *[0.0] * (_ROOM - len(counts or ()))] if place == 0 else [_NONE] * _ROOM
    return [call + _RANKS - 1 - rank, -call - rank, *shared, *_other_sign(shared), *flags, *own]


def _other_sign(numbers: Sequence[float]) -> list[float]:
    """Return what makes the smallest of numbers from the largest, and the other way round."""
    return [-each if each != _NONE else _NONE for each in numbers]


def digest_of(text: str) -> float:
    """Return 52 bits of a hash of a text; 0 for an empty one."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 12) if text else 0.0


def _different_calls(last: int, first: int) -> UsageError | None:
    """Return the error for ranks that make different calls, None if all make the same.  last, first: the last call and
    the first (`_largest`)."""
    calls = {_RANKS - 1 - last % _RANKS: last // _RANKS, first % _RANKS: first // _RANKS}
    if len(set(calls.values())) == 1:
        return None
    (one, call), (other, another) = sorted(calls.items())
    return UsageError(
        f"ranks {one} and {other} make different calls",
        why=f"rank {one} calls {NAMES[call % _CALLS]} as its call number {call // _CALLS}, rank {other} calls "
        f"{NAMES[another % _CALLS]} as its number {another // _CALLS}",
        fix="let every rank make the same calls in the same order; work of rank 0 alone comes after the call",
    )


def ended_early(rank: int, other: int) -> BatchError:
    """Return the error for a rank whose batches end while another one's go on."""
    return BatchError(
        f"the batches of rank {rank} ended before those of rank {other}",
        why="every rank needs the same number of batches, also ranks that need no data",
        fix="iterate over the same number on every rank; batches may be None where pipe.needs_data is False",
    )


def different_batches(ranks: Sequence[int]) -> BatchError:
    """Return the error for replicas of the first stage, on these ranks, that were given different batches."""
    return BatchError(
        "the replicas of the first stage were given different batches",
        where=f"ranks {', '.join(map(str, ranks))}",
        why="the rows of one batch are divided between them, and only the first batch is counted",
        fix="pass every rank the same batch (no DistributedSampler; the same seed for the data loader everywhere), or "
        "each its own rows, with pipe.step(batch, sharded=True)",
    )


def _different_given(
    first: int, rank: int, one: list[float], other: list[float], versions: Sequence[str]
) -> BatchError:
    ended = [rank for rank, row in ((first, one), (rank, other)) if row[3] == digest_of(END)]
    if len(ended) == 1:
        return ended_early(ended[0], rank if ended[0] == first else first)
    if one[4] != other[4]:
        changes = [f"rank {r}: {versions[r].partition(' ')[2] or 'no change'}" for r in (first, rank)]
        what = f"the models of ranks {first} and {rank} were changed in different ways since they were compiled"
        why = f"their last changes are, on {'; on '.join(changes)}"
        fix = "make every change of the model on all ranks, before the same step"
    elif one[6] != other[6]:
        what = f"the loss is scaled by {one[6]:g} on rank {first} and by {other[6]:g} on rank {rank}"
        why = "scale= differs, or pipe.scaler was changed, or loaded, on some ranks alone"
        fix = "pass the same scale=, and load the same state, on every rank"
    elif one[9] != other[9]:
        what = f"pipe.steps is {one[9]:g} on rank {first} and {other[9]:g} on rank {rank}"
        why = "it is part of the key of random numbers"
        fix = "set pipe.steps, and load the same state, on every rank"
    elif one[7] != other[7]:
        what = f"sharded= differs between ranks {first} and {rank}"
        why = "either every rank is given the whole batch, or each its own rows"
        fix = "pass the same on every rank, also where the batch is None"
    else:
        what = f"ranks {first} and {rank} were given batches of different shapes"
        why = f"{int(one[5])} and {int(other[5])} rows, or other inputs"
        fix = "give every rank the same batch (rank 0's data is what is used), or its own rows with sharded=True"
    return BatchError(what, why=why, fix=fix)
