"""The largest of each of some numbers over all ranks, and the sums of others, equal to the last bit on all of them.

Few ranks send theirs to all, and each combines them in the order of ranks.  More ranks combine them along a tree: a
rank sends and receives log2(ranks) messages, 2 more where the number of ranks is no power of two.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

TOGETHER = 32
"""Ranks up to which each sends to all others: one message in the background costs less than rounds of a thread."""
_TAG = 1 << 19
"""The tag of these messages."""


def begin_together(group: dist.ProcessGroup, mine: torch.Tensor, largest: int) -> Callable[[], list[float]]:
    """Send numbers, of which the first are `largest`, to all ranks; return a function that waits for the result."""
    size = group.size()
    everyone = mine.new_empty(size, len(mine))
    work = dist.all_gather(list(everyone), mine, group=group, async_op=True)

    def found() -> list[float]:
        work.wait()
        sums = everyone[:, largest:].tolist()
        return [*everyone[:, :largest].amax(0).tolist(), *(sum(column) for column in zip(*sums, strict=True))]

    return found


class Tree:
    """A thread that takes the numbers of one rank along the tree, one exchange after another, in the order in which all
    ranks begin them; it waits for messages while the main thread computes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._begun: queue.SimpleQueue[tuple[Future[torch.Tensor], torch.Tensor, int] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="autopart-exchange", daemon=True).start()

    def begin(self, mine: torch.Tensor, largest: int) -> Callable[[], list[float]]:
        """Send numbers, of which the first are `largest`, on their way; return a function that waits for the result."""
        found: Future[torch.Tensor] = Future()
        self._begun.put((found, mine, largest))
        return lambda: found.result().tolist()

    def end(self) -> None:
        """End the thread, when it has done what was begun."""
        self._begun.put(None)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            found, mine, largest = begun
            try:
                found.set_result(reduced(self._group, mine, largest))
            except BaseException as error:  # the group was broken: the main thread raises it where it waits
                found.set_exception(error)


def reduced(group: dist.ProcessGroup, mine: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the numbers of all ranks combined: the first `largest` by maximum, the rest by sum.  Collective.

    Ranks of the largest power of two exchange with the rank 1, 2, 4 ... away, after which both have the same; each rank
    beyond gives its numbers to one of them first, and gets the result from it."""
    rank, size = group.rank(), group.size()
    core = 1 << (size.bit_length() - 1)
    sent: list[Any] = []

    def send(numbers: torch.Tensor, peer: int) -> None:
        sent.append(group.send([numbers], peer, _TAG))

    def received(peer: int) -> torch.Tensor:
        numbers = torch.empty_like(mine)
        group.recv([numbers], peer, _TAG).wait()
        return numbers

    own, beyond = mine, rank + core
    if rank >= core:
        send(own, rank - core)
        own = received(rank - core)
    elif beyond < size:
        own = _combined(own, received(beyond), largest)
    away = 1
    while rank < core and away < core:
        send(own, rank ^ away)
        own = _combined(own, received(rank ^ away), largest)
        away *= 2
    if beyond < size:
        send(own, beyond)
    for work in sent:
        work.wait()
    return own


def _combined(own: torch.Tensor, other: torch.Tensor, largest: int) -> torch.Tensor:
    """Return both combined, in memory of its own, since `own` may still be on its way."""
    found = torch.maximum(own, other)
    found[largest:] = own[largest:] + other[largest:]
    return found
