"""A length of sequences that was seen before costs neither a capture nor an exchange."""

from __future__ import annotations

from support.jobs import length_jobs as jobs
from support.workers import Workers

LENGTHS = tuple(range(5, 13))


def test_lengths_that_were_seen_are_not_captured_again(pair: Workers) -> None:
    for first, again, planned, others in pair.run(jobs.counted, LENGTHS):
        assert first >= len(LENGTHS)
        assert again == 0
        assert set(others) == set(planned), "exchanges of a step"
