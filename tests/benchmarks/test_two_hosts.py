"""Tests of two network namespaces joined by a limited link: exact, and as fast as predicted."""

from __future__ import annotations

import pytest

from benchmarks.steps import two_hosts


def test_the_cluster_describes_the_link() -> None:
    cluster = two_hosts.cluster_of(40)
    assert [level.size for level in cluster.levels] == [1, 2]
    assert 4_700_000 < cluster.link(0, 1).bytes_per_s < 5_000_000


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_two_hosts_are_exact_and_predicted_at_two_bandwidths() -> None:
    if reason := two_hosts.why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    rows = two_hosts.compared(two_hosts.RATES, rounds=8)
    for ranks in two_hosts.RANKS:
        slow, fast = (row for row in rows if row["ranks"] == ranks)
        assert slow["measured"].median > 1.5 * fast["measured"].median  # the link is the bottleneck
        assert slow["exact"] and fast["exact"]
        assert abs(slow["error"]) <= 0.15 and abs(fast["error"]) <= 0.15, (slow, fast)
