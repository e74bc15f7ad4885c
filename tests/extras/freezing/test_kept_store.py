"""The store of activations: what it returns is what was put, and it never holds more than its bounds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from autopart.extras.freezing.kept import store as stores
from autopart.extras.freezing.kept.store import Extents, SampleStore

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.int64)


def tensors(seed: int, count: int) -> list[torch.Tensor]:
    """Return tensors of several types and shapes, also without elements."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 2, (seed % 3, 1 + place), generator=generator).to(DTYPES[(seed + place) % len(DTYPES)])
        for place in range(count)
    ]


class Stores(RuleBasedStateMachine):
    """Puts, gets, drops and clears; the model is a dictionary of what put() said that it kept."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.known = SampleStore(64, 96), dict[int, tuple[int, list[torch.Tensor]]]()

    @rule(key=st.integers(0, 9), seed=st.integers(0, 99), count=st.integers(1, 3))
    def put(self, key: int, seed: int, count: int) -> None:
        given = tensors(seed, count)
        self.known.pop(key, None)
        if self.store.put(key, ((str(seed),), b""), b"d", given):
            self.known[key] = seed, [tensor.clone() for tensor in given]
        for tensor in given:
            tensor.zero_()  # the store has copies

    @rule(key=st.integers(0, 9))
    def drop(self, key: int) -> None:
        self.store.drop(key)
        self.known.pop(key, None)

    @precondition(lambda self: len(self.known) > 4)
    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.known.clear()

    @invariant()
    def holds_what_it_said_within_its_bounds(self) -> None:
        assert len(self.store) == len(self.known)
        assert self.store.memory_used <= 64 and self.store.disk_used <= 96
        size = sum(tensor.nbytes for _, own in self.known.values() for tensor in own)
        assert self.store.memory_used + self.store.disk_used == size
        for key in range(10):
            entry = self.store.get(key)
            assert (entry is None) == (key not in self.known)
            if entry is not None:
                seed, own = self.known[key]
                assert entry.tag == ((str(seed),), b"") and entry.digest == b"d"
                for found, expected in zip(entry.tensors, own, strict=True):
                    assert found.dtype == expected.dtype and torch.equal(found, expected)


TestStores = Stores.TestCase


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
def test_extents_overlap_never_and_join_again(steps: list[tuple[bool, int]]) -> None:
    extents, taken = Extents(32), list[tuple[int, int]]()
    for takes, size in steps:
        if takes:
            offset = extents.take(size)
            free = [i for i in range(32 - size + 1) if all(i + size <= o or o + s <= i for o, s in taken)]
            assert offset == (min(free) if free else None)
            taken += [(offset, size)] if offset is not None else []
        elif taken:
            extents.give(*taken.pop(size % len(taken)))
        assert extents.used == sum(size for _, size in taken)


def test_ten_times_more_samples_than_fit_stay_within_the_bounds(tmp_path: Path) -> None:
    store = SampleStore(4 * 80, 6 * 80, str(tmp_path))
    rows = [torch.randn(10, dtype=torch.float64) for _ in range(100)]
    for _ in range(2):
        for key, row in enumerate(rows):
            entry = store.get(key)
            assert entry is None or torch.equal(entry.tensors[0], row)
            if entry is None:
                store.put(key, ((), b""), b"", [row])
    assert (len(store), store.memory_used, store.disk_used) == (10, 320, 480)
    assert store._file is not None and os.fstat(store._file.fileno()).st_size <= 480
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_record_that_was_changed_counts_as_missing() -> None:
    store = SampleStore(0, 1000)
    store.put("a", ((), b""), b"", [torch.ones(8)])
    assert store._file is not None
    os.pwrite(store._file.fileno(), b"x", 5)
    assert store.get("a") is None and len(store) == 0
    assert store.put("a", ((), b""), b"", [torch.ones(8)]) and store.get("a") is not None


def test_without_space_on_the_disk_a_warning_says_so_and_nothing_more_goes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SampleStore(8, 1000)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores.os, "pwrite", full)
    with pytest.warns(UserWarning, match="no more activations are kept on disk"):
        assert not store.put("a", ((), b""), b"", [torch.ones(8)])
    assert not store.put("b", ((), b""), b"", [torch.ones(8)]) and store.put("c", (), b"", [torch.ones(2)])
    assert store.get("a") is None and store.disk_used == 0


KILLED = """
import sys, torch
from autopart.extras.freezing.kept.store import SampleStore
store = SampleStore(0, 1 << 24, sys.argv[1])
print("begun", flush=True)
key = 0
while True:
    store.put(key % 300, ((), b""), b"", [torch.ones(4096)])
    key += 1
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(5):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGKILL)
        assert list(tmp_path.iterdir()) == []
