"""The order of samples and the position in them: each sample once an epoch, wherever a run is cut."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs.state import sampler_jobs
from support.jobs.state.checkpoint_jobs import model
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autopart
from autopart.extras.sampler.sampler import DataPosition, Order, PositionedSampler
from autopart.files.checkpoints.document import hash_of
from autopart.ir.errors import CheckpointError, UsageError


def start() -> DataPosition:
    """Return the position of a pipe that has just been made."""
    return DataPosition(SimpleNamespace(companions={}))


def restarted(position: DataPosition) -> DataPosition:
    """Return the position of a new process that has loaded what this one saves."""
    new = start()
    new.load(position.state(), {})
    return new


@settings(max_examples=60)
@given(size=st.integers(1, 40), parts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12))
def test_each_sample_comes_once_an_epoch_however_often_a_run_is_cut(size: int, parts: list[tuple[int, int]]) -> None:
    dataset, position = range(size), start()
    seen: dict[int, list[int]] = {}
    for rows, steps in [*parts, (3, 10**6)]:  # each part takes some steps of its own size, then the process ends
        sampler = position.sampler(dataset, rows, seed=7, shuffle=True, drop_last=False)
        while steps and position.epoch < 3:
            for batch in sampler:
                seen.setdefault(position.epoch, []).extend(batch)
                position.batch_given()
                steps -= 1
                if not steps:
                    break
        position = restarted(position)
    assert [sorted(seen[epoch]) for epoch in range(3)] == [list(range(size))] * 3
    assert [seen[epoch] for epoch in range(3)] == [Order(size, 7, True).of(epoch).tolist() for epoch in range(3)]


def test_batches_that_workers_took_ahead_are_not_counted() -> None:
    position = start()
    dataset = TensorDataset(torch.arange(23))
    sampler = position.sampler(dataset, 4, seed=0, shuffle=True, drop_last=False)
    taken: list[int] = []
    for (batch,) in DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=2):
        taken += batch.tolist()
        position.batch_given()
        if len(taken) == 8:
            break
    position = restarted(position)
    assert position.consumed == 8
    rest = position.sampler(dataset, 5, seed=0, shuffle=True, drop_last=False)
    for (batch,) in DataLoader(dataset, batch_sampler=rest):
        taken += batch.tolist()
        position.batch_given()
    assert sorted(taken) == list(range(23)) and (position.epoch, position.consumed) == (1, 0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_gives_each_sample_once_and_its_own_state_is_refused(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    position, dataset, taken = start(), TensorDataset(torch.arange(23)), list[int]()
    sampler = position.sampler(dataset, 4, seed=0, shuffle=True, drop_last=False)
    loader = torchdata.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    for (batch,) in loader:
        taken += batch.tolist()
        position.batch_given()
        if len(taken) == 8:
            break
    state = loader.state_dict()
    position = restarted(position)
    rest = position.sampler(dataset, 5, seed=0, shuffle=True, drop_last=False)
    loader = torchdata.StatefulDataLoader(dataset, batch_sampler=rest, num_workers=workers)
    for (batch,) in loader:
        taken += batch.tolist()
        position.batch_given()
    assert sorted(taken) == list(range(23)) and (position.epoch, position.consumed) == (1, 0)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="load_state_dict was called on a StatefulDataLoader"):
        iter(loader)


def test_the_state_of_a_stateful_loader_cannot_move_the_position() -> None:
    sampler = start().sampler(range(10), 4, seed=0, shuffle=True, drop_last=False)
    assert sampler.state_dict() == {}
    with pytest.raises(UsageError, match=r"pipe\.load sets it"):
        sampler.load_state_dict({})


def test_drop_last_ends_an_epoch_before_the_smaller_batch() -> None:
    position = start()
    sampler = position.sampler(range(10), 4, seed=0, shuffle=False, drop_last=True)
    for batch in sampler:
        assert len(batch) == 4
        position.batch_given()
    assert position.epoch == 1 and len(sampler) == 2


def test_another_order_than_the_position_has_is_refused() -> None:
    position = start()
    position.sampler(range(10), 4, seed=0, shuffle=True, drop_last=False)
    for size, seed, shuffle in ((11, 0, True), (10, 1, True), (10, 0, False)):
        with pytest.raises(UsageError, match="does not fit the position"):
            PositionedSampler(restarted(position), Order(size, seed, shuffle), 4, False)


def test_a_load_ends_an_iteration_from_before_it() -> None:
    position = start()
    batches = iter(position.sampler(range(10), 4, seed=0, shuffle=True, drop_last=False))
    next(batches)
    position.load(position.state(), {})
    with pytest.raises(UsageError, match="a checkpoint was loaded"):
        next(batches)


def test_a_step_that_is_refused_counts_once_whether_the_loop_goes_on_or_tries_again() -> None:
    position = start()

    def given(*batch: object, refused: bool = False) -> int:
        with contextlib.suppress(UsageError), position.around_step(None, batch):
            if refused:
                raise UsageError("not now")
        return position.consumed

    iter(position.sampler(range(40), 4, seed=0, shuffle=True, drop_last=False))
    first, second = object(), object()
    assert [given(first, refused=True), given(second), given(second)] == [4, 8, 12]  # only a refused one is tried again
    assert [given(first, refused=True), given(first, refused=True), given(first), given(second)] == [16, 16, 16, 20]
    assert [given(None, refused=True), given(None)] == [24, 28]  # a rank without data: the loop went on


def test_batches_that_no_step_was_given_come_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    position = start()
    sampler = position.sampler(range(10), 4, seed=0, shuffle=False, drop_last=False)
    for batch in sampler:
        if batch[0] != 4:
            position.batch_given()
    assert not caplog.records
    assert list(sampler) == [[8, 9]]
    assert "2 samples of epoch 0 come now that the sampler has handed out before" in caplog.text


def test_an_iteration_goes_no_further_once_another_has_begun() -> None:
    sampler = start().sampler(range(10), 4, seed=0, shuffle=True, drop_last=False)
    first = iter(sampler)
    next(first)
    next(iter(sampler))
    with pytest.raises(UsageError, match="another iteration began"):
        next(first)


def test_what_train_took_ahead_comes_again_after_it_was_dropped_and_nothing_comes_behind_it() -> None:
    position = start()
    sampler = position.sampler(range(10), 4, seed=0, shuffle=False, drop_last=False)
    batches = iter(sampler)
    for _ in range(2):
        next(batches)
        position.batch_taken()
    position.batch_given()
    assert (position.consumed, sampler.consumed) == (4, 8)
    position.batches_dropped()
    with pytest.raises(UsageError, match="taken behind others that were dropped"):
        position.batch_taken()
    with pytest.raises(UsageError, match=r"pipe\.train dropped batches"):
        next(batches)
    assert list(sampler) == [[4, 5, 6, 7], [8, 9]]


def test_datasets_without_indices_are_refused_by_name() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UsageError, match="Stream"):
        start().sampler(Stream(), 4, seed=0, shuffle=True, drop_last=False)


GOOD = {"size": 10, "seed": 3, "shuffle": True, "epoch": 1, "consumed": 4}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"size": "10"}, "size of the position in the data is '10'"),
        ({"size": 0}, "size of the position"),
        ({"seed": 1.5}, "seed of the position in the data is 1.5"),
        ({"seed": -1}, "seed of the position"),
        ({"shuffle": 1}, "shuffle of the position in the data is 1"),
        ({"epoch": True}, "epoch of the position in the data is True"),
        ({"epoch": None}, "epoch of the position in the data is None"),
        ({"consumed": 11}, "consumed of the position in the data is 11"),
        ({"consumed": [4]}, "consumed of the position"),
    ],
)
def test_a_position_that_no_checkpoint_of_ours_has_is_refused_by_name(changed: dict[str, object], named: str) -> None:
    position = start()
    position.check(GOOD)
    position.check({})
    for state in (GOOD | changed, {key: GOOD[key] for key in GOOD.keys() - changed.keys()}, [], "text"):
        with pytest.raises(CheckpointError) as caught:
            position.check(state)
        if state == GOOD | changed:
            assert named in str(caught.value)
    assert position.order is None


def test_a_checkpoint_with_a_changed_position_changes_nothing(tmp_path: Path) -> None:
    sample = dict(zip(("ids", "labels"), sampler_jobs.dataset()[: sampler_jobs.ROWS], strict=True))
    with autopart.compile(model(0), "cpu:1", sample=sample, costs="analytic", micro_batches=1, stages=1) as pipe:
        pipe.sampler(sampler_jobs.dataset(), rows=sampler_jobs.ROWS)
        page = pipe.save(tmp_path) / "checkpoint.json"
        kept = json.loads(page.read_text())
        kept["companions"]["data"]["consumed"] = "4"
        del kept["sha256"]
        page.write_text(json.dumps(kept | {"sha256": hash_of(kept)}))
        with torch.no_grad():
            next(pipe.parameters()).add_(1.0)
        before = pipe.state_dict()
        with pytest.raises(CheckpointError, match="consumed of the position in the data is '4'"):
            pipe.load(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
