"""What has to hold where the replicas of a stage share the optimizer's state."""

from __future__ import annotations

from typing import Any

from support.jobs.zero_jobs import Beside, Counts, beside_whole


def shared_state(
    pool: Any, name: str, counts: Counts, accumulated: int = 1, clip: float | None = None, **options: Any
) -> list[Beside]:
    """Train with shared state beside the same without; the results by rank.

    All replicas of a stage together hold the state that each had; and each its part, as far as whole parameters can be
    dealt out.  counts: at most 2 each, of which sums do not depend on the order in which they are added up.
    """
    results: list[Beside] = pool.run(beside_whole, name, counts, options, 10, accumulated, clip)
    assert [result.wrong for result in results] == [[]] * len(results)
    assert any(result.whole for result in results)
    for number, count in enumerate(counts):
        stage = [result for result in results if result.stage == number]
        assert len(stage) == count
        whole, largest = stage[0].whole, stage[0].largest
        assert sum(result.shared for result in stage) == whole
        assert max(result.shared for result in stage) <= whole / count + largest * (1 - 1 / count)
        trained = [name for result in stage for name in result.trained]
        assert len(set(trained)) == len(trained)
    return results
