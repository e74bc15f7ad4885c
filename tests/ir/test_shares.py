"""Which rows of a micro-batch each replica has, and what passes between the replicas of two stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.program import split_rows
from autopart.ir.shares import passages, row_shares, row_windows

COUNTS = st.integers(1, 9)


@given(st.integers(0, 40), COUNTS)
def test_shares_are_even_and_have_every_row_once(rows: int, count: int) -> None:
    shares = row_shares(rows, count)
    assert sum(shares) == rows and max(shares) - min(shares) <= 1
    assert shares[0] == max(shares)  # where there are fewer rows than replicas, the first has some
    ends = [0, *(window.end for window in row_windows(rows, count))]
    assert [window.first for window in row_windows(rows, count)] == ends[:-1]


@given(st.integers(0, 40), COUNTS, COUNTS)
def test_a_message_carries_each_row_once_and_the_rest_once_to_each_receiver(rows: int, many: int, more: int) -> None:
    senders, receivers = range(many), range(100, 100 + more)
    found = passages(rows, senders, receivers)
    carried = [row for passage in found for row in range(passage.first, passage.end)]
    assert sorted(carried) == list(range(rows))
    mine = dict(zip(senders, row_windows(rows, many), strict=True))
    theirs = dict(zip(receivers, row_windows(rows, more), strict=True))
    for passage in found:
        for window in (mine[passage.src], theirs[passage.dst]):
            assert window.first <= passage.first < passage.end <= window.end
        assert passage.all_rows == (mine[passage.src] == theirs[passage.dst])
    filled = [rank for rank, window in theirs.items() if window.own]
    assert [passage.dst for passage in found if passage.carries_whole] == filled


@given(st.integers(0, 60), COUNTS, COUNTS)
def test_nothing_passes_outside_the_channels_that_were_opened(rows: int, many: int, more: int) -> None:
    senders, receivers = range(many), range(100, 100 + more)
    channels = {(t.src_rank, t.dst_rank) for t in split_rows(senders, receivers)}
    assert {(passage.src, passage.dst) for passage in passages(rows, senders, receivers)} <= channels
