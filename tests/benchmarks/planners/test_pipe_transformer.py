"""PipeTransformer's rules as its published code has them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.planners.pipe_transformer import balanced, stages_for

VIT = [2.36, 4.72] * 12


@given(st.lists(st.floats(0.1, 10.0), min_size=8, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_every_sub_layer_is_in_one_stage_and_every_stage_has_one(sizes: list[float], stages: int) -> None:
    counts = balanced(sizes, stages)
    assert len(counts) == stages and sum(counts) == len(sizes) and min(counts) >= 1


def test_a_stage_stays_below_the_mean_so_the_last_gets_what_is_left() -> None:
    assert balanced([1.0] * 16, 4) == [3, 4, 4, 5]


def test_the_pipeline_is_halved_as_layers_freeze_as_in_the_paper() -> None:
    stages = [stages_for(VIT, len(VIT) - 2 * frozen, 8) for frozen in (4, 7, 9, 10, 11)]
    assert stages == sorted(stages, reverse=True) and stages[0] < 8 and stages[-1] == 1
