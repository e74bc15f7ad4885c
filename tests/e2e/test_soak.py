"""Long runs do not accumulate memory, file descriptors or threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.soak_jobs import soaked
from support.workers import Workers

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs /proc to read the resources of a process"
)
GROWTH_BYTES = 1 << 20
"""Allowed growth over a thousand steps: a leak of a kilobyte per step is detected."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_thousand_steps_hold_no_more_memory_descriptors_or_threads(replicas):
    options = {"stages": 2, "replicas": replicas, "micro_batches": 2}
    with Workers(2 * replicas, timeout=1700) as pool:
        every = pool.run(soaked, "tied", 2000, options)
    for seen in every:
        half, last = seen[4], seen[-1]
        assert last.resident - half.resident < GROWTH_BYTES, seen
        assert (last.descriptors, last.threads) == (half.descriptors, half.threads), seen
