"""The schedules, drawn, and the rules that any number of stages keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.errors import UsageError
from autopart.ir.plan import SCHEDULES, in_flight
from autopart.ir.program import parse_actions
from autopart.passes.program.schedules import order

DRAWN = {
    ("gpipe", 2, 3): """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2""",
    ("1f1b", 2, 3): """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2""",
    ("1f1b", 3, 5): """
        0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4""",
    ("1f1b", 4, 2): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
        3F0 3B0 3F1 3B1""",
    ("1f1b", 1, 3): "0F0 0B0 0F1 0B1 0F2 0B2",
    ("gpipe", 1, 2): "0F0 0F1 0B0 0B1",
}


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_schedule_is_as_drawn(case: tuple[str, int, int]) -> None:
    schedule, stages, micros = case
    drawn = parse_actions(DRAWN[case].strip())
    assert order(stages, micros, schedule) == tuple("".join(a.kind for a in actions) for actions in drawn)


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12))
def test_each_stage_reaches_its_limit_and_never_passes_it(schedule: str, stages: int, micros: int) -> None:
    for s, kinds in enumerate(order(stages, micros, schedule)):
        live, peak = 0, 0
        for kind in kinds:
            live += 1 if kind == "F" else -1
            peak = max(peak, live)
        assert peak == in_flight(schedule, s, stages, micros)
        assert kinds.count("F") == kinds.count("B") == micros


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"zigzag.*\n.*1f1b, 1f1b-deep, gpipe, pipedream"):
        order(2, 2, "zigzag")
