"""The order of samples and the position in them: each sample once an epoch, wherever a run is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autopart.ir.errors import UsageError
from autopart.session.state.sampler import DataPosition, Order, PositionedSampler, sampler_of


def restarted(position: DataPosition) -> DataPosition:
    """Return the position of a new process that has loaded what this one saves."""
    new = DataPosition()
    new.load(position.state(), {})
    return new


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), parts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12))
def test_each_sample_comes_once_an_epoch_however_often_a_run_is_cut(size: int, parts: list[tuple[int, int]]) -> None:
    dataset, position = range(size), DataPosition()
    seen: dict[int, list[int]] = {}
    for rows, steps in [*parts, (3, 10**6)]:  # each part takes some steps of its own size, then the process ends
        sampler = sampler_of(position, dataset, rows, 7, shuffle=True, drop_last=False)
        while steps and position.epoch < 3:
            for batch in sampler:
                seen.setdefault(position.epoch, []).extend(batch)
                position.advance()
                steps -= 1
                if not steps:
                    break
        position = restarted(position)
    assert [sorted(seen[epoch]) for epoch in range(3)] == [list(range(size))] * 3
    assert [seen[epoch] for epoch in range(3)] == [Order(size, 7, True).of(epoch).tolist() for epoch in range(3)]


def test_batches_that_workers_took_ahead_are_not_counted() -> None:
    position = DataPosition()
    dataset = TensorDataset(torch.arange(23))
    sampler = sampler_of(position, dataset, 4, 0, shuffle=True, drop_last=False)
    taken: list[int] = []
    for (batch,) in DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=2):
        taken += batch.tolist()
        position.advance()
        if len(taken) == 8:
            break
    position = restarted(position)
    assert position.consumed == 8
    rest = sampler_of(position, dataset, 5, 0, shuffle=True, drop_last=False)
    for (batch,) in DataLoader(dataset, batch_sampler=rest):
        taken += batch.tolist()
        position.advance()
    assert sorted(taken) == list(range(23)) and (position.epoch, position.consumed) == (1, 0)


def test_drop_last_ends_an_epoch_before_the_smaller_batch() -> None:
    position = DataPosition()
    sampler = sampler_of(position, range(10), 4, 0, shuffle=False, drop_last=True)
    for batch in sampler:
        assert len(batch) == 4
        position.advance()
    assert position.epoch == 1 and len(sampler) == 2


def test_another_order_than_the_position_has_is_refused() -> None:
    position = DataPosition()
    sampler_of(position, range(10), 4, 0, shuffle=True, drop_last=False)
    for size, seed, shuffle in ((11, 0, True), (10, 1, True), (10, 0, False)):
        with pytest.raises(UsageError, match="does not fit the position"):
            PositionedSampler(restarted(position), Order(size, seed, shuffle), 4, False)


def test_a_load_ends_an_iteration_from_before_it() -> None:
    position = DataPosition()
    batches = iter(sampler_of(position, range(10), 4, 0, shuffle=True, drop_last=False))
    next(batches)
    position.load(position.state(), {})
    with pytest.raises(UsageError, match="loaded while batches"):
        next(batches)


def test_datasets_without_indices_are_refused_by_name() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UsageError, match="Stream"):
        sampler_of(DataPosition(), Stream(), 4, 0, shuffle=True, drop_last=False)
