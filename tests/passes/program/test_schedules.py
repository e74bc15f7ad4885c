"""The schedules, drawn, and the rules that any number of stages keeps."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.parts import parse_actions

from autopart.ir.errors import ProgramError, UsageError
from autopart.ir.program import Edge, Program
from autopart.passes.program.linearize import linear_order
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.orders import LOOP, Order, Schedule, Shape, V, homes_of, placed, texts_of
from autopart.passes.program.schedules import (
    find,
    in_flight,
    most_held,
    most_tokens,
    names,
    pattern,
    register,
    worker_orders,
)

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
    ("zb-h1", 3, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    ("zb-h2", 2, 4): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3""",
}


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_schedule_is_as_drawn(case: tuple[str, int, int]) -> None:
    schedule, stages, micros = case
    drawn = [[(a.kind, a.stage, a.micro) for a in parse_actions(line)] for line in DRAWN[case].strip().splitlines()]
    assert list(map(list, worker_orders(find(schedule), Shape(stages, micros)))) == drawn


SEVERAL = {
    ("gpipe", LOOP, 2, 2, 2): """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""",
    ("interleaved", LOOP, 2, 2, 4): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""",
    ("zb-v", V, 2, 2, 3): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""",
}


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_schedule_of_several_stages_a_worker_is_as_drawn(case: tuple[str, str, int, int, int]) -> None:
    schedule, placement, workers, each, micros = case
    shape = Shape(workers * each, micros, homes=placed(placement, workers * each, workers))
    assert list(texts_of(worker_orders(find(schedule), shape))) == [
        line.strip() for line in SEVERAL[case].split("\n")[1:]
    ]


def test_stages_are_placed_in_loops_or_as_a_v() -> None:
    assert placed(LOOP, 6, 2) == (0, 1, 0, 1, 0, 1)
    assert placed(V, 6, 2) == (0, 1, 1, 0, 0, 1)
    assert placed(V, 3, 3) == ()
    assert Shape(6, 1, homes=placed(V, 6, 2)).workers == ((0, 3, 4), (1, 2, 5))
    assert homes_of([(4, 5), (1,), (1,), (5, 4)]) == (0, 1, 1, 0)
    assert homes_of([(4,), (1,)]) == ()


@given(
    st.sampled_from(["gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"]),
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 3),
)  # fmt: skip
def test_any_size_of_a_named_schedule_is_complete_and_ends(
    name: str, workers: int, each: int, micros: int, slices: int
) -> None:
    schedule = find(name)
    each = {"zb-h1": 1, "zb-h2": 1, "zb-v": 2}.get(name, each)
    stages, slices = workers * each, slices if schedule.sliced else 1
    homes = placed(schedule.placement if name != "gpipe" else LOOP, stages, workers)
    shape = Shape(stages, micros, slices, homes=homes)
    orders = list(worker_orders(schedule, shape))
    assert Counter(turn for turns in orders for turn in turns) == Counter(
        (kind, s, unit)
        for kind in ("FIW" if schedule.splits else "FB")
        for s in range(stages)
        for unit in range(micros * slices)
    )
    ranks = tuple((home,) for home in homes or range(stages))
    links = tuple(Edge(s, s + 1, ("v",), ("v",)) for s in range(stages - 1))
    linear_order(name, orders, Program(micros, workers, ranks, (), links, slices=slices))
    for s in range(stages):
        limit = most_held(schedule, s, shape)
        assert limit is None or limit >= most_tokens(schedule, shape, (1,) * slices)[s]


def test_zb_h1_holds_what_the_first_stage_of_1f1b_holds_and_zb_h2_almost_twice_that() -> None:
    for s in range(4):
        assert most_tokens(find("zb-h1"), Shape(4, 9), (1,))[s] == 4
        assert most_tokens(find("zb-h2"), Shape(4, 9), (1,))[s] == 7


@pytest.mark.parametrize(
    ("schedule", "shape", "message"),
    [
        ("1f1b", Shape(4, 2, homes=(0, 1, 0, 1)), "1f1b has no order for several stages on a worker"),
        ("zb-h1", Shape(4, 2, homes=(0, 1, 0, 1)), "zb-h1 has no order for several stages on a worker"),
        ("interleaved", Shape(4, 2, homes=(0, 1, 1, 0)), "interleaved has no order for these stages on these workers"),
        ("interleaved", Shape(3, 2, homes=(0, 1, 0)), "interleaved has no order for these stages on these workers"),
        ("interleaved", Shape(4, 2, 1, (2, 2, 2, 2), (0, 1, 0, 1)), "no order for replicas that take"),
        ("zb-v", Shape(4, 2, homes=(0, 1, 0, 1)), "zb-v has no order for these stages on these workers"),
        ("zb-v", Shape(6, 2, homes=(0, 1, 1, 0, 0, 1)), "zb-v runs two stages on each worker"),
        ("zb-v", Shape(4, 2, 2, homes=(0, 1, 1, 0)), "zb-v has no order over slices"),
        ("searched", Shape(1, 1), "searched needs an order"),
        ("searched", Shape(1, 1, order=("0F0 0SF0>1",)), "'0SF0>1' in the order of the plan is not a compute"),
        ("1f1b", Shape(1, 1, order=("0F0 0B0",)), "1f1b has an order of its own, and the plan fixes another"),
    ],
)  # fmt: skip
def test_shapes_that_a_schedule_has_no_order_for_are_refused(schedule: str, shape: Shape, message: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(message)):
        list(worker_orders(find(schedule), shape))


def test_an_order_in_the_plan_is_what_its_workers_run() -> None:
    order = ("0F0 0F0.1 1F0 1F0.1 1I0.1 1B0 1W0.1 0B0.1 0B0",)
    turns = [*worker_orders(find("searched"), Shape(2, 1, 2, homes=(0, 0), order=order))]
    assert turns[0][:3] == (("F", 0, 0), ("F", 0, 1), ("F", 1, 0)) and texts_of(turns, 2) == order


SLICED = {
    ("gpipe", 2, 2, 2): """
        0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1
        1F0 1F0.1 1F1 1F1.1 1B0.1 1B0 1B1.1 1B1""",
    ("1f1b", 2, 2, 2): """
        0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1
        1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1""",
    ("1f1b", 3, 1, 3): """
        0F0 0F0.1 0F0.2 0B0.2 0B0.1 0B0
        1F0 1F0.1 1F0.2 1B0.2 1B0.1 1B0
        2F0 2F0.1 2F0.2 2B0.2 2B0.1 2B0""",
}


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_schedule_over_slices_is_as_drawn(case: tuple[str, int, int, int]) -> None:
    schedule, stages, micros, slices = case
    actions = [parse_actions(line) for line in SLICED[case].strip().splitlines()]
    drawn = [[(a.kind, a.stage, slices * a.micro + a.slot.slice) for a in own] for own in actions]
    assert list(map(list, worker_orders(find(schedule), Shape(stages, micros, slices)))) == drawn


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12), st.integers(2, 6))
def test_slices_go_back_last_in_first_out_and_few_are_held(
    schedule: str, stages: int, micros: int, slices: int
) -> None:
    made, units, shape = find(schedule), micros * slices, Shape(stages, micros, slices)
    for s, turns in enumerate(worker_orders(made, shape)):
        live, peak = 0, 0
        for kind, _, _ in turns:
            live += 1 if kind == "F" else -1
            peak = max(peak, live)
        assert peak == most_held(made, s, shape) == in_flight(made, s, shape)
        if schedule == "1f1b":  # Seq1F1B: so many before the first that is followed by its backward
            assert peak == min(units, stages - s + slices - 1)
        assert [unit for kind, _, unit in turns if kind == "F"] == [*range(units)]
        back = [divmod(unit, slices) for kind, _, unit in turns if kind == "B"]
        assert back == [(m, j) for m in range(micros) for j in reversed(range(slices))]


def test_only_the_built_in_synchronous_schedules_take_slices() -> None:
    for schedule in (find("pipedream"), Schedule("mine", lambda stages, micros: [["0F0", "0B0"]])):
        with pytest.raises(ProgramError, match="no order over slices"):
            list(worker_orders(schedule, Shape(1, 1, 2)))


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 12))
def test_each_stage_reaches_its_limit_and_never_passes_it(schedule: str, stages: int, micros: int) -> None:
    made = find(schedule)
    for s, turns in enumerate(worker_orders(made, Shape(stages, micros))):
        live, peak = 0, 0
        for kind, _, _ in turns:
            live += 1 if kind == "F" else -1
            peak = max(peak, live)
        assert made.limit is not None
        assert peak == made.limit(s, stages, micros) == in_flight(made, s, Shape(stages, micros))
        assert (
            [i for kind, _, i in turns if kind == "F"] == [i for kind, _, i in turns if kind == "B"] == [*range(micros)]
        )


def test_what_is_in_flight_is_counted_on_the_worker_that_runs_the_stage() -> None:
    looped = Schedule("looped", lambda stages, micros: [["0F0", "2F0", "0F1", "0B0", "2B0", "0B1"], ["1F0", "1B0"]])
    assert [in_flight(looped, s, Shape(3, 2)) for s in range(3)] == [2, 1, 1]


def test_a_pattern_knows_whether_messages_arrive_in_the_order_in_which_they_leave() -> None:
    crossed = Schedule("crossed", lambda stages, micros: [["0F0", "0F1", "0B0", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    assert not pattern(crossed, Shape(2, 2)).in_order
    assert pattern(find("1f1b"), Shape(2, 2)).in_order


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda stages, micros: [["0F0", "0SF0>1"]], "0SF0 is not a compute"),
        (lambda stages, micros: [["0F0", "5B0"]], "5B0 is not a compute"),
        (lambda stages, micros: [["0F2"]], "0F2 is not a compute"),
        (lambda stages, micros: ["0F0 0B0"], "not an action|no compute"),
        (lambda stages, micros: 7, "did not return an order"),
        (lambda stages, micros: [["0F0.1"]], "is a slice"),
    ],
)
def test_what_is_no_order_of_computes_is_refused(order: Order, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        list(worker_orders(Schedule("mine", order), Shape(2, 2)))


def test_a_plain_function_is_registered_under_its_name_and_can_be_replaced() -> None:
    def reversed_gpipe(stages: int, micros: int) -> list[list[str]]:
        backward = [i for i in reversed(range(micros))]
        return [[f"{s}F{i}" for i in range(micros)] + [f"{s}B{i}" for i in backward] for s in range(stages)]

    assert register(reversed_gpipe) is find("reversed_gpipe")
    assert "reversed_gpipe" in names()
    again = register(find("gpipe").order, name="reversed_gpipe")
    assert find("reversed_gpipe") is again


@pytest.mark.parametrize("name", ["auto", "gpipe", "pipedream"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is taken"):
        register(lambda stages, micros: [], name=name)


def test_a_schedule_without_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        register(lambda stages, micros: [])


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"zigzag[\s\S]*1f1b, 1f1b-deep, gpipe, pipedream[\s\S]*register"):
        find("zigzag")
