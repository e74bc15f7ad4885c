"""Which samples come next: an order from (seed, epoch) alone, and a position in samples that checkpoints keep."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from autopart.ir.errors import UsageError
from autopart.session.state.companions import refusal, require_integer


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


class DataPosition:
    """How far training has come in its data; a companion of checkpoints.

    It moves with the steps of the pipe, not with the batches that a loader takes ahead.
    """

    def __init__(self) -> None:
        self.order: Order | None = None
        self.epoch = self.consumed = 0
        self.loads = 0
        """How often a checkpoint has set the position: an iterator from before it is stale."""
        self.rows = self.end = 0
        """Rows of a step, and samples after which the epoch ends, while an iterator is in use; 0: none is."""

    def advance(self) -> None:
        """Count the samples of one step of the pipe, if its batches come from a sampler."""
        if not self.end:
            return
        self.consumed = min(self.consumed + self.rows, self.end)
        if self.consumed == self.end:
            self.epoch, self.consumed, self.end = self.epoch + 1, 0, 0

    def state(self) -> dict[str, Any]:
        """Return the order and the position; {} if no sampler was ever made."""
        if self.order is None:
            return {}
        order = self.order
        return {
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "epoch": self.epoch,
            "consumed": self.consumed,
        }

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
        self.loads += 1


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
        """The epoch that the position is in, from 0."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch the pipe has stepped over."""
        return self._position.consumed

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
        position = self._position
        first, count = position.consumed, len(self)
        if not count:  # less than a batch is left since `rows` changed, and drop_last leaves it out
            position.epoch, position.consumed, first = position.epoch + 1, 0, 0
            count = len(self)
        end = first + count * self._rows if self._drop_last else self._order.size
        position.rows, position.end = self._rows, end
        return self._batches(self._order.of(position.epoch)[first:end], position.loads)

    def _batches(self, indices: torch.Tensor, loads: int) -> Iterator[list[int]]:
        for first in range(0, len(indices), self._rows):
            if self._position.loads != loads:
                raise UsageError(
                    "a checkpoint was loaded while batches of a sampler were taken",
                    why="the rest of this iteration belongs to the position before the load",
                    fix="load first, then iterate over the DataLoader",
                )
            yield indices[first : first + self._rows].tolist()

    def _require_same(self) -> None:
        stands = self._position.order
        if stands is not None and stands != self._order:
            raise UsageError(
                "the sampler does not fit the position in the data",
                where=f"sampler of {self._order}, position of {stands}",
                why="samples would be left out or come twice in the epoch",
                fix="use the dataset, seed= and shuffle= of the run that was saved; a pipe has one order of samples",
            )


def sampler_of(
    position: DataPosition, dataset: Any, rows: int, seed: int, *, shuffle: bool, drop_last: bool
) -> PositionedSampler:
    """Return a sampler over a dataset that moves a position.  Raises UsageError for what has no order or size."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"pipe.sampler was given a {type(dataset).__name__}, which has no indices",
            why="an order of samples needs a dataset with a length",
            fix="use a map-style dataset (__len__ and __getitem__), or keep the stream's position in extra= of save",
        )
    for name, value, least in (("rows", rows, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} is {value!r}", where="pipe.sampler", fix=f"pass an integer of at least {least}")
    size = len(dataset)
    if size < (rows if drop_last else 1):
        raise UsageError(f"the dataset has {size} samples, too few for a batch of {rows}", where="pipe.sampler")
    return PositionedSampler(position, Order(size, seed, bool(shuffle)), rows, drop_last)
