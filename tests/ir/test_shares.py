"""Which rows of a micro-batch each replica has, and what passes between the replicas of two stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.plan import Stage
from autopart.ir.shares import Division, division, passages, same_windows, split_rows

COUNTS = st.integers(1, 9)
SHARES = st.lists(st.integers(1, 7), min_size=1, max_size=6)
DIVISIONS = st.one_of(
    SHARES.map(lambda shares: division(len(shares), shares)),
    COUNTS.map(division),
    COUNTS.map(lambda count: division(count, policy="turn")),
)


@given(st.integers(0, 40), COUNTS)
def test_equal_shares_are_even_and_have_every_row_once(rows: int, count: int) -> None:
    windows = division(count).windows(3, rows)
    shares = [window.own for window in windows]
    assert sum(shares) == rows and max(shares) - min(shares) <= 1
    assert shares[0] == max(shares)  # where there are fewer rows than replicas, the first has some
    ends = [0, *(window.end for window in windows)]
    assert [window.first for window in windows] == ends[:-1]


@given(st.integers(0, 40), SHARES)
def test_unequal_shares_are_off_by_less_than_a_row(rows: int, shares: list[int]) -> None:
    divided = division(len(shares), shares)
    windows = divided.windows(0, rows)
    assert [row for window in windows for row in range(window.first, window.end)] == list(range(rows))
    for replica, (window, share) in enumerate(zip(windows, shares, strict=True)):
        assert abs(window.own - rows * share / sum(shares)) < 1
        assert window.own <= divided.part(rows, replica) <= divided.largest_part(rows)


@given(st.integers(0, 20), st.integers(0, 20), COUNTS)
def test_in_turn_one_replica_has_it_all(micro: int, rows: int, count: int) -> None:
    divided = division(count, policy="turn")
    owns = [window.own for window in divided.windows(micro, rows)]
    assert owns == [rows * (replica == micro % count) for replica in range(count)]
    assert divided.player(micro) == (micro % count if count > 1 else None)


def test_what_divides_alike_is_equal() -> None:
    assert Stage((), (4, 7)).division == Stage((), (0, 1), shares=(3, 3)).division == Division((1, 1))
    assert Stage((), (3,), policy="turn").division == Division()
    assert same_windows(division(2, policy="turn"), division(3, policy="turn"))
    assert not same_windows(division(2, policy="turn"), division(2))


@given(st.integers(0, 9), st.integers(0, 40), DIVISIONS, DIVISIONS)
def test_a_message_carries_each_row_once_and_the_rest_once_to_each_receiver(
    micro: int, rows: int, many: Division, more: Division
) -> None:
    senders, receivers = tuple(range(many.count)), tuple(range(100, 100 + more.count))
    ours, others = many.windows(micro, rows), more.windows(micro, rows)
    found = passages(ours, senders, others, receivers)
    carried = [row for passage in found for row in range(passage.first, passage.end)]
    assert sorted(carried) == list(range(rows))
    mine, theirs = dict(zip(senders, ours, strict=True)), dict(zip(receivers, others, strict=True))
    for passage in found:
        for window in (mine[passage.src], theirs[passage.dst]):
            assert window.first <= passage.first < passage.end <= window.end
        assert passage.all_rows == (mine[passage.src] == theirs[passage.dst])
        assert passage.all_rows or not same_windows(many, more)
    filled = [rank for rank, window in theirs.items() if window.own]
    assert [passage.dst for passage in found if passage.carries_whole] == filled


@given(st.integers(0, 9), st.integers(0, 60), DIVISIONS, DIVISIONS)
def test_nothing_passes_outside_the_channels_that_were_opened(
    micro: int, rows: int, many: Division, more: Division
) -> None:
    senders, receivers = tuple(range(many.count)), tuple(range(100, 100 + more.count))
    parts = split_rows(senders, receivers, many.cuts(micro), more.cuts(micro))
    found = passages(many.windows(micro, rows), senders, more.windows(micro, rows), receivers)
    assert {(passage.src, passage.dst) for passage in found} <= {(part.src_rank, part.dst_rank) for part in parts}
    assert sum(end - start for start, end in (part.rows for part in parts)) == parts[0].of
