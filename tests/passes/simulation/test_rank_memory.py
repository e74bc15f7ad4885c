"""Memory of ranks with several stages, and of split backwards: against a walk of every order, compute by compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.passes.program.orders import Schedule, Shape, placed
from autopart.passes.program.schedules import find, pattern
from autopart.passes.simulation.stage_costs import counts_of, most_bytes, of_stage

SHAPES = (
    ("1f1b", 1, "one"),
    ("gpipe", 1, "one"),
    ("zb-h1", 1, "one"),
    ("zb-h2", 1, "one"),
    ("interleaved", 2, "loop"),
    ("interleaved", 4, "loop"),
    ("zb-v", 2, "v"),
)


def walked(schedule: Schedule, shape: Shape, held: list[int], kept: list[int]) -> dict[tuple[int, ...], int]:
    """Return the most bytes of each worker, found by going through its order."""
    found: dict[tuple[int, ...], int] = {}
    for turns in pattern(schedule, shape).workers:
        now = most = 0
        for kind, s, _ in turns:
            now += {"F": held[s], "B": -held[s], "I": kept[s] - held[s], "W": -kept[s]}[kind]
            most = max(most, now)
        assert now == 0
        found[tuple(sorted({s for _, s, _ in turns}))] = most
    return found


@settings(max_examples=40)
@given(st.sampled_from(SHAPES), st.integers(1, 4), st.integers(1, 9), st.data())
def test_counts_give_what_a_walk_of_the_order_finds(
    kind: tuple[str, int, str], workers: int, micros: int, data: st.DataObject
) -> None:
    name, per_rank, placement = kind
    stages = workers * per_rank
    whole = tuple([s for s in range(stages) if data.draw(st.booleans())])
    shape = Shape(stages, micros, homes=placed(placement, stages, workers), whole=whole)
    sizes = st.lists(st.integers(0, 50), min_size=stages, max_size=stages)
    held, kept = data.draw(sizes), data.draw(sizes)
    counts = counts_of(find(name), shape)
    found = {own: most_bytes(rows, [held[s] for s in own], [kept[s] for s in own]) for own, rows in counts.items()}
    assert found == walked(find(name), shape, held, kept)
    parted = walked(find(name), replace(shape, whole=()), held, kept)
    assert all(parted[own] >= most for own, most in found.items())
    assert all(kept == 0 for s in whole for _, kept in of_stage(counts, s))
    for s in range(stages):
        held_here = [own if s == t else 0 for t, own in enumerate(held)]
        kept_here = [own if s == t else 0 for t, own in enumerate(kept)]
        alone = walked(find(name), shape, held_here, kept_here)
        assert max(alone.values()) == max(h * held[s] + k * kept[s] for h, k in of_stage(counts, s))


@pytest.mark.parametrize("micros", [1, 4, 9])
def test_whole_backwards_of_one_stage_hold_what_the_schedule_limits(micros: int) -> None:
    counts = counts_of(find("1f1b"), Shape(3, micros))
    assert [of_stage(counts, s) for s in range(3)] == [((min(micros, 3 - s), 0),) for s in range(3)]


def test_slices_count_their_tokens() -> None:
    counts = counts_of(find("gpipe"), Shape(1, 2, 2), (3, 1))
    assert of_stage(counts, 0) == ((8, 0),)
    assert most_bytes(counts[(0,)], [10], [0], tokens=4) == 20
