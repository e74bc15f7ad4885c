"""Which samples come next: an order from (seed, epoch) alone, and a position in samples that checkpoints keep."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from autopart.ir.errors import AutopartError, UsageError
from autopart.session.session import Session
from autopart.state.companions import refusal, require_integer
from autopart.state.core import Core, Part

_log = logging.getLogger("autopart")


@dataclass(frozen=True, slots=True)
class Order:
    """What the order of samples depends on, besides the epoch.  size: samples of the dataset."""

    size: int
    seed: int
    shuffle: bool

    def of(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch's samples in their order.  O(size), 8 bytes a sample."""
        if not self.shuffle:
            return torch.arange(self.size)
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(self.size, generator=generator)


_MORE = "pass a dataset with that many samples, or smaller rows="


class DataPosition(Part):
    """The part of a pipe that counts the samples of its steps: how far training has come in its data, which checkpoints
    keep, and samplers that go on from there.

    It moves with the batches that are given to the pipe, not with those that a loader takes ahead.  ahead: where it
    will be after each batch that `Pipe.train` has taken and not given yet: a new iteration begins behind these.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        core.companions["data"] = self
        self.order: Order | None = None
        self.epoch = self.consumed = 0
        self.ahead: deque[tuple[int, int]] = deque()
        self.turn = 0
        """Counts iterations, and whatever makes the one that is in use stale."""
        self.rows = self.end = self.given = 0
        """Rows of a batch, samples after which the epoch ends, and those that were handed out, while an iteration is in
        use; 0: none is."""
        self.dropped = False
        self._refused: Sequence[Any] = ()

    def sampler(
        self, dataset: Any, rows: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> PositionedSampler:
        """Return a batch sampler for `DataLoader(dataset, batch_sampler=...)`, alike on every rank.

        The order of samples depends only on (seed, epoch).  `save` saves the position, counted in the samples of steps,
        and after `load` the iteration continues there: each sample comes once in an epoch, even if the plan, the ranks
        or `rows` change.  During an iteration every `step` counts as one batch.  Raises UsageError for a dataset
        without a length, and if dataset size, seed or shuffle differ from those of the position.
        """
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise UsageError(
                f"pipe.sampler was given a {type(dataset).__name__}, which has no indices",
                why="an order of samples needs a dataset with a length",
                fix="use a map-style dataset (__len__ and __getitem__), or keep the stream's position in extra= of "
                "save",
            )
        for name, value, least in (("rows", rows, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(
                    f"{name} is {value!r}", where="pipe.sampler", fix=f"pass an integer of at least {least}"
                )
        size = len(dataset)
        if size < (rows if drop_last else 1):
            raise UsageError(
                f"the dataset has {size} samples, too few for a batch of {rows}", where="pipe.sampler", fix=_MORE
            )
        return PositionedSampler(self, Order(size, seed, bool(shuffle)), rows, drop_last)

    @property
    def next(self) -> tuple[int, int]:
        """The epoch that the next batch is in, and the samples of it that come before."""
        return self.ahead[-1] if self.ahead else (self.epoch, self.consumed)

    def batch_taken(self) -> None:
        """Note that a batch was taken ahead, if batches come from a sampler."""
        if self.dropped:
            raise UsageError(
                "batches of a sampler are taken behind others that were dropped",
                why="pipe.train had taken these ahead when it ended",
                fix="iterate over the DataLoader again: it begins with them",
            )
        if not self.end:
            return
        epoch, consumed = self.next
        consumed = min(consumed + self.rows, self.end)
        if consumed == self.end:
            epoch, consumed, self.end = epoch + 1, 0, 0
        self.ahead.append((epoch, consumed))

    def batches_dropped(self) -> None:
        """Forget the batches that were taken ahead: they come again."""
        if self.ahead:
            self.dropped, self.end, self.turn = True, 0, self.turn + 1
            self.ahead.clear()

    def batch_given(self) -> None:
        """Count the samples of one batch that the pipe is given, if its batches come from a sampler."""
        if not self.ahead:
            self.batch_taken()
        if self.ahead:
            self.epoch, self.consumed = self.ahead.popleft()

    @contextmanager
    def around_step(self, session: Session, batch: Sequence[Any]) -> Iterator[None]:
        """Count the batch of a step at its end, also if it is refused, as a loop then goes on with the next; once if
        the same objects are given again after that."""
        again = any(one is not None for one in batch) and [*map(id, batch)] == [*map(id, self._refused)]
        self._refused = ()
        try:
            yield
        except AutopartError:
            self._refused = batch
            raise
        finally:
            if not again:
                self.batch_given()

    def begin(self, size: int, rows: int, *, drop_last: bool) -> tuple[int, int, int]:
        """Begin an iteration: return the epoch, and the first and the last sample of it that come."""
        epoch, first = self.next
        if self.end and self.given == self.end > first:
            _log.warning(
                "%d samples of epoch %d come now that the sampler has handed out before, since no step was given them: "
                "right after a loop that was left early; a batch that a loop skips, or takes ahead by itself, comes "
                "twice", self.end - first, epoch,
            )  # fmt: skip
        end = first + (size - first) // rows * rows if drop_last else size
        if end == first:  # less than a batch is left since `rows` changed, and drop_last leaves it out
            epoch, first, end = epoch + 1, 0, size // rows * rows
            if self.ahead:
                self.ahead[-1] = epoch, first
            else:
                self.epoch, self.consumed = epoch, first
        self.rows, self.end, self.given, self.dropped, self.turn = rows, end, first, False, self.turn + 1
        return epoch, first, end

    def state(self) -> dict[str, Any]:
        """Return the order and the position; {} if no sampler was ever made."""
        if self.order is None:
            return {}
        return {**asdict(self.order), "epoch": self.epoch, "consumed": self.consumed}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: a position is numbers."""
        return {}

    def check(self, state: Any) -> None:
        """Raise CheckpointError for an invalid position; valid are {} and all numbers within the dataset."""
        if not isinstance(state, dict):
            raise refusal("the position in the data", state, "it has to be a dict")
        if not state:
            return
        for name, least in (("size", 1), ("seed", 0), ("epoch", 0)):
            require_integer(state.get(name), f"{name} of the position in the data", least)
        require_integer(state.get("consumed"), "consumed of the position in the data", 0, state["size"])
        if not isinstance(state.get("shuffle"), bool):
            raise refusal("shuffle of the position in the data", state.get("shuffle"), "it has to be true or false")

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the position of a checkpoint; nothing changes for one that was written without a sampler."""
        if not state:
            return
        self.order = Order(state["size"], state["seed"], state["shuffle"])
        self.epoch, self.consumed, self.end = state["epoch"], state["consumed"], 0
        self.ahead.clear()
        self.turn += 1


class PositionedSampler(Sampler[list[int]]):
    """A batch sampler for any DataLoader: the rest of an epoch from the position on, then whole epochs.

    Each iteration ends with the epoch.  `epoch` is the one that the next iteration is in.
    """

    def __init__(self, position: DataPosition, order: Order, rows: int, drop_last: bool) -> None:
        self._position, self._order, self._rows, self._drop_last = position, order, rows, drop_last
        self._require_same()
        position.order = order

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in, from 0; behind the batches that `pipe.train` has taken ahead."""
        return self._position.next[0]

    @property
    def consumed(self) -> int:
        """How many samples of this epoch come before the next iteration."""
        return self._position.next[1]

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch."""
        left = self._order.size - self.consumed
        return left // self._rows if self._drop_last else -(-left // self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing for the state of torchdata's StatefulDataLoader: checkpoints of the pipe have the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError: a StatefulDataLoader that was given a state of its own would skip batches that the position
        has already passed."""
        raise UsageError(
            "load_state_dict was called on a StatefulDataLoader with the sampler of a pipe",
            why="pipe.save keeps the position in the data and pipe.load sets it: the loader would move it once more",
            fix="leave out state_dict and load_state_dict of the loader; a state of the dataset goes into extra= of "
            "pipe.save",
        )

    def __iter__(self) -> Iterator[list[int]]:
        self._require_same()
        epoch, first, end = self._position.begin(self._order.size, self._rows, drop_last=self._drop_last)
        return self._batches(self._order.of(epoch)[first:end], self._position.turn)

    def _batches(self, indices: torch.Tensor, turn: int) -> Iterator[list[int]]:
        for first in range(0, len(indices), self._rows):
            if self._position.turn != turn:
                raise UsageError(
                    "batches of a sampler are taken, and its position was set since the iteration began",
                    why="a checkpoint was loaded, another iteration began, or pipe.train dropped batches; the rest of "
                    "this one belongs to the position before",
                    fix="load first, then iterate over the DataLoader, once at a time",
                )
            own = indices[first : first + self._rows].tolist()
            self._position.given += len(own)
            yield own

    def _require_same(self) -> None:
        stands = self._position.order
        if stands is not None and stands != self._order:
            raise UsageError(
                "the sampler does not fit the position in the data",
                where=f"sampler of {self._order}, position of {stands}",
                why="samples would be left out or come twice in the epoch",
                fix="use the dataset, seed= and shuffle= of the run that was saved; a pipe has one order of samples",
            )
