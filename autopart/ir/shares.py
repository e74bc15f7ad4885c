"""Replicas: which rows of a micro-batch each rank of a stage has, and which rows of a message go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a value holds the rows of a micro-batch: its `axis` has size stride * rows * block, and the row of an element
    is the middle index.  Flattening (batch, sequence) gives stride 1, flattening (sequence, batch) stride sequence."""

    axis: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one replica: `own` rows from row `first` on, of a micro-batch of `whole` rows."""

    first: int
    own: int
    whole: int

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.first + self.own

    @property
    def is_all(self) -> bool:
        """Whether it is the whole micro-batch."""
        return self.own == self.whole


@dataclass(frozen=True, slots=True)
class Passage:
    """What passes between one rank of a stage and one rank of a later stage for a micro-batch.

    src, dst: the ranks, in the direction of the forward.  first, end: rows of the micro-batch.  carries_whole: values
    without rows pass here too: each receiver takes them from one sender, to which their gradients come back.
    all_rows: these are all rows that either of the two has.
    """

    src: int
    dst: int
    first: int
    end: int
    carries_whole: bool
    all_rows: bool


def row_windows(rows: int, replicas: int) -> tuple[Window, ...]:
    """The rows of each replica, in order: as even as can be; where there are fewer rows than replicas, some have none.

    The cuts stand at i * rows / replicas, rounded up.  So two ranks of two stages have rows in common only where the
    equal shares of `program.split_rows` have, whatever the number of rows: a channel for each of those is enough.
    """
    cuts = [-(-i * rows // replicas) for i in range(replicas + 1)]
    return tuple(Window(first, end - first, rows) for first, end in pairwise(cuts))


def row_shares(rows: int, replicas: int) -> tuple[int, ...]:
    """How many rows each replica has."""
    return tuple(window.own for window in row_windows(rows, replicas))


def passages(rows: int, senders: Sequence[int], receivers: Sequence[int]) -> tuple[Passage, ...]:
    """What passes between the ranks of two stages for a micro-batch of `rows` rows: each row once, in order; and values
    without rows once to each receiver.  O(senders * receivers)."""
    found: list[Passage] = []
    sent = row_windows(rows, len(senders))
    for dst, theirs in zip(receivers, row_windows(rows, len(receivers)), strict=True):
        first_sender = True
        for src, mine in zip(senders, sent, strict=True):
            first, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
            if first < end:
                found.append(Passage(src, dst, first, end, first_sender, mine == theirs))
                first_sender = False
    return tuple(found)
