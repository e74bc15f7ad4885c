"""Captures are kept by count and bytes, the least recently used go first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.capture.recent import Recent
from autopart.ir.graph import Size

calls = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 6), st.booleans()), max_size=40)


@given(calls, st.integers(1, 4), st.integers(1, 12))
def test_what_was_used_last_is_kept_within_both_bounds(calls, most, most_bytes):
    recent = Recent[str, int](most, lambda size: size, most_bytes)
    order: list[tuple[str, int]] = []  # by brute force: the last one was used last
    hits = 0
    for key, size, adds in calls:
        found = dict(order).get(key)
        if adds:
            recent.add(key, size)
            order = [*((k, s) for k, s in order if k != key), (key, size)]
            while len(order) > most or (len(order) > 1 and sum(s for _, s in order) > most_bytes):
                del order[0]
        else:
            assert recent.peek(key) == found == recent.get(key)
            if found is not None:
                hits += 1
                order = [*((k, s) for k, s in order if k != key), (key, found)]
        assert list(recent.values()) == [s for _, s in order]
        assert (len(recent), recent.size_bytes, recent.hits) == (len(order), sum(s for _, s in order), hits)


class Table(nn.Module):
    """Adds a tensor that is an attribute, and one that tracing makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(4, 4), torch.randn(100_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) + self.table[:4] + torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()


def test_bytes_count_programs_and_constants_once():
    captures = CaptureCache(Table())
    sizes = []
    for length in (3, 4):
        captured = captures(flatten((torch.randn(2, length, 4),)), Size(2))
        sizes.append(captures.kept.size_bytes)
    assert sizes[0] == captured.program_bytes + 400_000 + 16
    assert sizes[1] == sizes[0] + captured.program_bytes + 16


def test_captures_beyond_the_bytes_are_made_again():
    captures = CaptureCache(Table())
    batches = [flatten((torch.randn(2, length, 4),)) for length in (3, 4, 5)]
    captures(batches[0], Size(2))
    captures.kept.most_bytes = 2 * captures.kept.size_bytes
    for batch in batches:
        captures(batch, Size(2))
    assert captures.made == 3
    for batch in (batches[1], batches[2], batches[0]):  # all of them fit
        captures(batch, Size(2))
    assert captures.made == 3
    captures.kept.most_bytes = captures.kept.size_bytes
    captures(flatten((torch.randn(2, 6, 4),)), Size(2))
    assert captures.made == 4 and len(captures.kept) == 3
    captures(batches[2], Size(2))
    assert captures.made == 4
    captures(batches[1], Size(2))
    assert captures.made == 5
