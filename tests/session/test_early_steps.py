"""A step begins before the ranks have agreed on it; what the agreement protects against is refused as without it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import early_step_jobs as jobs
from support.workers import Workers

from autopart.ir.errors import BatchError, UsageError
from autopart.session.ranks.call_sync import _agreed, _told


def test_the_first_stage_computes_before_other_ranks_make_the_step(pair: Workers) -> None:
    first, second = pair.run(jobs.begun_before_the_other_rank, 0)
    assert first == second


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("kind", "error"), [("call", UsageError), ("rows", BatchError)])
def test_ranks_that_do_different_things_are_told_and_the_next_step_is_as_without_it(
    pair: Workers, stages: int, kind: str, error: type
) -> None:
    for found, before, after in pair.run(jobs.refused_after_beginning, stages, kind):
        assert type(found) is error and "different" in found.what, found
        assert before == after


def test_replicas_with_other_data_are_refused_after_their_forward(pair: Workers) -> None:
    for found, before, after in pair.run(jobs.refused_after_beginning, 1, "data"):
        assert type(found) is BatchError and "different batches" in found.what
        assert before == after


def test_a_replica_without_a_batch_is_refused(pair: Workers) -> None:
    for found, before, after in pair.run(jobs.refused_after_beginning, 1, "scale"):
        assert type(found) is BatchError and "no batch" in found.what
        assert before == after


# ---- what ranks tell each other --------------------------------------------------------------------------------------

HASHES = st.sampled_from([0.0, 1.0, 2.0**52 - 1])
ROWS = st.builds(
    lambda *numbers: [float(number) for number in numbers],
    st.sampled_from([0, 1]), st.sampled_from([3, 4]), st.sampled_from([0, 0, 0, 1]), HASHES, HASHES,
    st.sampled_from([4, 8]), st.sampled_from([1.0, 1024.0]), st.sampled_from([0, 0, 0, 1]), st.booleans(),
)  # fmt: skip
COUNTS = st.one_of(st.just(()), st.tuples(st.sampled_from([0.0, 5.0, 7.0]), st.sampled_from([0.0, 3.0, math.inf])))
Rank = tuple[list[float], tuple[float, ...], bool]


def alike(ranks: list[Rank]) -> bool:
    """Whether nothing differs that all ranks, or all that have a batch, have to have alike."""
    rows = [row for row, _, _ in ranks]
    held = [row for row in rows if row[3]]
    seen = {counts[0] for _, counts, _ in ranks if counts and counts[0]}
    same: Callable[[list[list[float]], int], bool] = lambda of, place: len({row[place] for row in of}) <= 1  # noqa: E731
    return (
        all(same(rows, place) for place in (0, 1, 4, 6, 7))
        and all(same(held, place) for place in (3, 5))
        and len(seen) <= 1
        and not any(row[2] or row[7] or apart for row, _, apart in ranks)
        and all(math.isfinite(number) for _, counts, _ in ranks for number in counts)
    )


@given(st.lists(st.tuples(ROWS, COUNTS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_the_largest_numbers_show_whether_ranks_were_given_the_same(ranks: list[Rank], copied: bool) -> None:
    if copied:  # mostly alike
        ranks = [([*ranks[0][0][:3], row[3] and ranks[0][0][3], *ranks[0][0][4:]], c, False) for row, c, _ in ranks]
    told = [_told(row, counts, apart=apart) for row, counts, apart in ranks]
    found = _agreed([max(column) for column in zip(*told, strict=True)], len(ranks))
    assert (found is not None) == alike(ranks)
    if found is None:
        return
    held = [row for row, _, _ in ranks if row[3]]
    assert found.signature == (held[0][3] if held else 0.0)
    assert found.rows == ((held[0][5] if held else 0),) * len(ranks)
    assert found.missing == (len(held) < len(ranks))
    if all(row[8] for row, _, _ in ranks):
        largest = [max((c[p] for _, c, _ in ranks if c), default=None) for p in (0, 1)]
        assert all(
            list(found.counts[r]) == [largest[0] or 0.0, *([] if largest[1] is None else largest[1:])]
            for r in range(len(ranks))
        )
    else:
        assert found.counts == ()
