"""Tests of steps on shared cores, against hand-computed times and the longest path."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.shared_cores import Pool, Task, shared_ns

Ranks = list[list[Task]]


def alone(*ns: float) -> Ranks:
    return [[Task(each)] for each in ns]


@pytest.mark.parametrize(
    ("ns", "cores", "expected"),
    [((4,), 1, 4), ((4, 2), 1, 6), ((4, 2), 2, 4), ((3, 3, 3), 2, 4.5), ((6, 3, 3), 2, 4.5 + 3)],
)
def test_ranks_of_a_pool_share_its_cores_evenly(ns: tuple[float, ...], cores: int, expected: float) -> None:
    pool = Pool(tuple(range(len(ns))), cores)
    assert shared_ns(alone(*ns), [0] * len(ns), [pool]) == pytest.approx(expected)


def test_a_message_is_carried_at_both_ends_while_the_sender_goes_on() -> None:
    ranks = [[Task(5, posts=(("a", 1),)), Task(7)], [Task(4, waits=("a",))]]
    apart = [Pool((0,), 1), Pool((1,), 1)]
    # carried beside the second task of rank 0 at half the pace until 5 + 2 * 3, then by rank 1
    assert shared_ns(ranks, [3, 2], apart) == pytest.approx(max(5 + 7 + 3, 5 + 2 * 3 + 2 + 4))


def test_a_slower_rank_on_the_same_core_is_seen_behind_a_message() -> None:
    ranks = [[Task(4)], [Task(2, posts=(("a", 2),))], [Task(3, waits=("a",))]]
    # ranks 0 and 1 each have half of the core until rank 1 is done at 4
    assert shared_ns(ranks, [0, 0, 0], [Pool((0, 1)), Pool((2,))]) == pytest.approx(4 + 3)


def test_a_rank_that_waits_for_ever_is_named() -> None:
    with pytest.raises(ValueError, match="rank 0 waits for ever"):
        shared_ns([[Task(1, waits=("a",))]], [0], [Pool((0,))])


@st.composite
def steps(draw: st.DrawFn) -> Ranks:
    """Draw ranks whose tasks wait for messages of tasks that stand before them in one order of all."""
    world = draw(st.integers(1, 4))
    ranks: Ranks = [[] for _ in range(world)]
    posted: list[tuple[int, int]] = []  # (rank, its task)
    for rank in draw(st.lists(st.integers(0, world - 1), max_size=12)):
        sources = draw(st.lists(st.sampled_from(posted), max_size=2, unique=True)) if posted else []
        keys = tuple((source, (rank, len(ranks[rank]))) for source in sources)
        for (source, place), key in zip(sources, keys, strict=True):
            before = ranks[source][place]
            ranks[source][place] = Task(before.ns, before.waits, (*before.posts, (key, rank)))
        ranks[rank].append(Task(draw(st.integers(0, 9)), keys))
        posted.append((rank, len(ranks[rank]) - 1))
    return ranks


def longest_path(ranks: Ranks) -> float:
    @cache
    def end(rank: int, place: int) -> float:
        task = ranks[rank][place]
        before = [end(*source) for source, _ in task.waits]  # type: ignore[misc]
        return task.ns + max([*before, end(rank, place - 1) if place else 0], default=0)

    return max((end(rank, len(own) - 1) for rank, own in enumerate(ranks) if own), default=0)


@given(steps())
def test_with_a_core_for_each_rank_a_step_is_its_longest_path(ranks: Ranks) -> None:
    pools = [Pool((rank,)) for rank in range(len(ranks))]
    assert shared_ns(ranks, [0] * len(ranks), pools) == pytest.approx(longest_path(ranks))


@given(steps(), st.integers(1, 3))
def test_shared_cores_are_never_faster_than_their_work_nor_idle_without_need(ranks: Ranks, cores: int) -> None:
    work = sum(task.ns for own in ranks for task in own)
    took = shared_ns(ranks, [0] * len(ranks), [Pool(tuple(range(len(ranks))), cores)])
    least = max(longest_path(ranks), work / cores)
    assert least - 1e-6 <= took <= work / cores + longest_path(ranks) + 1e-6  # Graham's bound
    if cores == 1:
        assert took == pytest.approx(work)
