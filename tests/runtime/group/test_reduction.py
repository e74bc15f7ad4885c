"""Numbers of all ranks combined: along the tree, over messages in memory and over Gloo, as by one process."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict, deque
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.workers import Workers

from autopart.runtime.group import world as worlds
from autopart.runtime.group.reduction import reduced
from autopart.runtime.group.world import World
from autopart.session.ranks import call_sync
from autopart.session.ranks.call_sync import Calls


def tree_and_together() -> tuple[list[list[float]], list[list[float]]]:
    """Return the results of three exchanges, of which the second begins before the first is waited for, both ways."""
    found = []
    for together in (0, 32):
        with mock.patch.object(worlds, "TOGETHER", together):
            world = World("cpu", int(os.environ["WORLD_SIZE"]))
            mine = [float(world.rank), 7.0 - world.rank], [float(world.rank)]
            begun = [world.begin_reducing(*mine), world.begin_reducing(*mine)]
            found.append([*(settle() for settle in begun), world.reduce_numbers(*mine)])
            world.close()
    return found[0], found[1]


# -- tests -----------------------------------------------------------------------------------------------------------


NUMBERS = st.one_of(
    st.just(-math.inf), st.just(math.inf), st.floats(-1e6, 1e6), st.integers(0, 2**52).map(float), st.just(0.0)
)


class Messages:
    """Messages of ranks that are threads, as torch's groups send them."""

    def __init__(self, size: int) -> None:
        self.size, self.boxes, self.changed = size, defaultdict(deque), threading.Condition()
        self.sent: dict[int, int] = defaultdict(int)

    def group(self, rank: int) -> Any:
        return _Group(self, rank)


class _Group:
    def __init__(self, messages: Messages, rank: int) -> None:
        self._messages, self._rank = messages, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._messages.size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        with self._messages.changed:
            self._messages.boxes[self._rank, peer].append(tensors[0])  # not copied: it must not be changed any more
            self._messages.sent[self._rank] += 1
            self._messages.changed.notify_all()
        return _Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        box = self._messages.boxes[peer, self._rank]
        with self._messages.changed:
            assert self._messages.changed.wait_for(lambda: box, timeout=60)
            tensors[0].copy_(box.popleft())
        return _Done()


class _Done:
    def wait(self) -> None:
        pass


@settings(max_examples=60)
@given(st.data(), st.integers(1, 37), st.integers(1, 4), st.integers(0, 2))
def test_a_tree_of_any_number_of_ranks_finds_the_largest_and_the_sums_alike_on_all(
    data: st.DataObject, size: int, largest: int, summed: int
) -> None:
    row = st.lists(NUMBERS, min_size=largest, max_size=largest)
    sums = st.lists(st.floats(-1e3, 1e3), min_size=summed, max_size=summed)
    rows = [[*data.draw(row), *data.draw(sums)] for _ in range(size)]
    messages, found = Messages(size), {}

    def run(rank: int) -> None:
        mine = torch.tensor(rows[rank], dtype=torch.float64)
        found[rank] = reduced(messages.group(rank), mine, largest).tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(found) == size and all(found[rank] == found[0] for rank in found)
    columns = list(zip(*rows, strict=True))
    assert found[0][:largest] == [max(column) for column in columns[:largest]]
    assert found[0][largest:] == pytest.approx([math.fsum(column) for column in columns[largest:]], abs=1e-9)
    assert max(messages.sent.values(), default=0) <= (size - 1).bit_length() + 1


class _Alone:
    """The messages of one rank of many that all tell the same."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self.sent = rank, size, 0
        self._last = torch.empty(0)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent, self._last = self.sent + 1, tensors[0]
        return _Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        tensors[0].copy_(self._last)
        return _Done()


class _World:
    """A world whose exchange has messages in memory."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.group = rank, size, _Alone(rank, size)

    def begin_reducing(self, largest: list[float], summed: list[float]) -> Any:
        mine = torch.tensor([*largest, *summed], dtype=torch.float64)
        return lambda: reduced(self.group, mine, len(largest)).tolist()  # type: ignore[arg-type]


def exchange_s(size: int, needed: tuple[int, ...]) -> tuple[float, int]:
    """Return the processor time of the exchange before a step on one rank, the least of five, and its messages."""
    took, sent = [], 0
    for _ in range(5):
        world = _World(size - 1, size)
        calls = Calls(world)  # type: ignore[arg-type]
        began = time.process_time()
        given = calls.enter("step", needed=needed, signature="x", version="v", rows=4, counts=[1.0, 2.0])()
        took.append(time.process_time() - began)
        assert given.rows == 4 and not given.missing
        sent = world.group.sent
    return min(took), sent


def test_the_exchange_before_a_call_takes_a_rank_5_ms_at_most_among_16384() -> None:
    for needed in ((16383,), tuple(range(16384))):
        took, sent = exchange_s(16384, needed)
        assert took <= 5e-3 and sent <= 14, (took, sent)
    assert exchange_s(1 << 16, (0,))[0] <= 5e-3
    assert call_sync._RANKS > 1 << 16


def test_a_few_processes_combine_numbers_along_the_tree_and_together_alike() -> None:
    with Workers(3, timeout=100) as workers:
        for found in workers.run(tree_and_together):
            assert found == ([[2.0, 7.0, 3.0]] * 3, [[2.0, 7.0, 3.0]] * 3)
