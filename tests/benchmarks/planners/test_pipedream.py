"""Tests of PipeDream's cost model against hand-computed values, and of its solver against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.errors import InfeasibleError, UsageError
from benchmarks.papers.planners.pipedream import Level, Profile, Rules, Stage, evaluate, profile, solve

CHAIN = profile([[], [0], [1]], [3.0, 2.0, 1.0], [4.0, 8.0, 2.0], [10.0, 0.0, 20.0])


def test_a_stage_pays_compute_and_all_reduce_over_its_replicas() -> None:
    assert evaluate(CHAIN, [Level(4, 10.0)], [Stage(0, 3, 1)]) == 6.0
    assert evaluate(CHAIN, [Level(4, 10.0)], [Stage(0, 3, 3)]) == pytest.approx((6 + 4 * 2 * 30 / 30) / 3)


def test_a_later_stage_pays_its_transfers_over_its_own_replicas() -> None:
    stages = [Stage(0, 1, 2), Stage(1, 2, 2), Stage(2, 3, 1)]
    slow = [Level(5, 1.0)]
    assert evaluate(CHAIN, slow, stages) == 16.0  # 2 * 8 bytes into the last stage; the first takes 11.5 s
    assert evaluate(CHAIN, slow, [*stages[:2], Stage(2, 3, 2)]) == (1 + 4 * 20 / 2) / 2
    assert evaluate(CHAIN, slow, [Stage(0, 2, 1), Stage(2, 3, 1)]) == 16.0
    assert evaluate(CHAIN, slow, [Stage(0, 2, 1), Stage(2, 3, 1)], Rules(activations=False)) == 5.0


def test_the_first_all_reduce_of_an_upper_level_is_divided_by_the_level_below() -> None:
    inner = (Stage(0, 3, 2),)
    levels = [Level(2, 1e9), Level(2, 10.0)]
    below = (6 + 4 * 30 / 2e9) / 2
    assert evaluate(CHAIN, levels, [Stage(0, 3, 2, inner)]) == pytest.approx((below + 4 * 30 / 20 / 2) / 2)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    n = draw(st.integers(1, 4))
    parents = [[u for u in range(v) if draw(st.booleans())] or list(range(v))[-1:] for v in range(n)]
    numbers = st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n)
    return profile(parents, draw(numbers), draw(numbers), draw(numbers))


def pipelines(model: Profile, levels: list[Level], start: int, end: int) -> Iterator[tuple[Stage, ...]]:
    """Yield all pipelines of the states start..end - 1 that use every machine of the top level."""
    n = levels[-1].machines
    for count in range(1, n + 1):
        for cuts in combinations(range(start + 1, end), count - 1):
            bounds = [start, *cuts, end]
            if not all(model.legal[a, b - 1] for a, b in pairwise(bounds)):
                continue
            for ends in combinations(range(1, n), count - 1):
                sizes = [b - a for a, b in zip([0, *ends], [*ends, n], strict=True)]
                yield from _filled(model, levels, list(zip(bounds, bounds[1:], sizes, strict=False)))


def _filled(model: Profile, levels: list[Level], parts: list[tuple[int, int, int]]) -> Iterator[tuple[Stage, ...]]:
    if not parts:
        yield ()
        return
    (start, end, replicas), *rest = parts
    for inner in pipelines(model, levels[:-1], start, end) if len(levels) > 1 else [()]:
        for others in _filled(model, levels, rest):
            yield (Stage(start, end, replicas, inner), *others)


@settings(max_examples=60)
@given(profiles(), st.sampled_from([[4], [2, 2], [3]]), st.booleans())
def test_the_solver_finds_the_best_pipeline_of_all(model: Profile, machines: list[int], activations: bool) -> None:
    levels = [Level(n, 7.0 / (i + 1)) for i, n in enumerate(machines)]
    rules = Rules(activations=activations)
    best = min(evaluate(model, levels, p, rules) for p in pipelines(model, levels, 0, len(model.compute_s)))
    found = solve(model, levels, rules)
    assert found.objective_s == pytest.approx(best, rel=1e-12)
    assert evaluate(model, levels, found.stages, rules) == pytest.approx(best, rel=1e-12)
    assert sum(stage.replicas for stage in found.stages) == machines[-1]


def test_a_straight_pipeline_has_one_replica_per_stage() -> None:
    found = solve(CHAIN, [Level(3, 1e9)], Rules(straight=True))
    assert [stage.replicas for stage in found.stages] == [1, 1, 1]


def test_memory_counts_the_minibatches_in_flight() -> None:
    unlimited = solve(CHAIN, [Level(3, 1e3)])
    assert solve(CHAIN, [Level(3, 1e3)], Rules(memory_bytes=1e9)) == unlimited
    tight = solve(
        CHAIN, [Level(3, 1e3)], Rules(memory_bytes=0.0)
    )  # only the last stage fits, which is charged no memory
    assert [stage.replicas for stage in tight.stages] == [3]
    with pytest.raises(InfeasibleError, match="memory"):
        solve(CHAIN, [Level(3, 1e3)], Rules(straight=True, memory_bytes=0.0))


def test_a_cluster_without_machines_is_refused() -> None:
    with pytest.raises(UsageError):
        solve(CHAIN, [])
    with pytest.raises(UsageError):
        solve(CHAIN, [Level(0, 1.0)])
