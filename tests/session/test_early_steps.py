"""A step begins before the ranks have agreed on it; what the agreement protects against is refused as without it."""

from __future__ import annotations

import pytest
from support.jobs import early_step_jobs as jobs
from support.workers import Workers

from autopart.ir.errors import BatchError, UsageError


@pytest.mark.parametrize(("stages", "counted"), [(1, True), (2, False)])
def test_the_first_rank_computes_before_others_make_the_step(pair: Workers, stages: int, counted: bool) -> None:
    first, second = pair.run(jobs.begun_before_the_other_rank, stages, counted)
    assert first == second


@pytest.mark.parametrize(
    ("stages", "kind", "error", "counted"),
    [
        (1, "call", UsageError, True),
        (2, "call", UsageError, False),
        (1, "rows", BatchError, False),
        (2, "rows", BatchError, True),
    ],
)
def test_ranks_that_do_different_things_are_told_and_the_next_step_is_as_without_it(
    pair: Workers, stages: int, kind: str, error: type, counted: bool
) -> None:
    for found, before, after in pair.run(jobs.refused_after_beginning, stages, kind, counted):
        assert type(found) is error and "different" in found.what, found
        assert before == after


@pytest.mark.parametrize(
    ("kind", "what", "counted"), [("data", "different batches", True), ("none", "no batch", False)]
)
def test_replicas_with_other_data_or_none_are_refused_after_their_forward(
    pair: Workers, kind: str, what: str, counted: bool
) -> None:
    for found, before, after in pair.run(jobs.refused_after_beginning, 1, kind, counted):
        assert type(found) is BatchError and what in found.what
        assert before == after
