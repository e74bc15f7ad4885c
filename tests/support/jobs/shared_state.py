"""A check of training in which the replicas of a stage share the optimizer state."""

from __future__ import annotations

from typing import Any

from support.jobs.zero_jobs import Comparison, Counts, compare_sharing

CASES: list[tuple[str, Counts, dict[str, Any]]] = [
    ("tied", (2, 2), {"accumulated": 2, "clip": 0.1}),
    ("llama_tied", (2, 2), {"clip": 0.1, "bucket_bytes": 10_000}),
    ("shared_by_all", (2, 1), {"accumulated": 2}),
    ("stack", (2, 2), {"precision": "bf16", "clip": 0.1}),
    ("skips", (2, 2), {"precision": "fp16", "recompute": "all"}),
    ("tied", (2, 2), {"transport": "fake-nccl"}),
]
"""Models, replicas of each stage and options of `shared_state`."""


def shared_state(
    pool: Any, name: str, counts: Counts, accumulated: int = 1, clip: float | None = None, **options: Any
) -> list[Comparison]:
    """Train with and without shared optimizer state, check the results and return them by rank.

    The replicas of a stage together must hold exactly one copy of the state, divided as evenly as whole parameters
    allow. counts: replicas of each stage, at most 2, so that sums do not depend on the order of addition.
    """
    results: list[Comparison] = pool.run(compare_sharing, name, counts, options, 10, accumulated, clip)
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
