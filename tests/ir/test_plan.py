"""Plans: what is wrong with one is found once, with its place, and a plan explains itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from support.languages.graphs import graph
from support.languages.plans import changed, decisions, plans

from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.errors import PlanError, PlanFileError
from autopart.ir.plan import (
    Alternative,
    Decision,
    Estimate,
    Optimality,
    Outlook,
    Plan,
    Provenance,
    Stage,
    check,
    check_decision,
    decision_problems,
    problems,
)
from autopart.report.plan_table import stage_table


def example() -> Plan:
    """Two stages on two of three ranks, with everything filled in."""
    estimate = Estimate(*(10**6 * i for i in range(1, 10)))
    return Plan(
        Provenance("g", "s", "2.13.0", "measured"),
        Decision(3, (Stage(("a", "b"), (0,), (("a",),)), Stage(("c",), (2,))), (4, 4, 3), "1f1b"),
        Outlook(
            20_000_000,
            0.25,
            (estimate, estimate),
            ("rank 1 idles",),
            Optimality.of(20_000_000, 19_000_000),
            (Alternative("1 stage", 25_000_000, "+25.0%"),),
        ),
    )


@given(plans())
def test_a_valid_plan_has_no_problems(plan: Plan) -> None:
    assert list(problems(plan)) == [] and check(plan) is plan


@given(decisions())
def test_a_valid_decision_has_no_problems(decision: Decision) -> None:
    assert list(decision_problems(decision)) == [] and check_decision(decision) is decision


TWICE = (Stage(("a", "b", "a"), (0,)), Stage(("c",), (0, 7)))
WHOLE = (Stage(("a", "b"), (0,), whole_backward=True), Stage(("c",), (1,)))


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        ({"world": 0}, ["world", "stages[0].ranks[0]", "stages[1].ranks[0]"]),
        ({"schedule": ""}, ["schedule"]),
        ({"stages": ()}, ["stages"]),
        ({"micro_rows": ()}, ["micro_rows"]),
        ({"micro_rows": (1, 0)}, ["micro_rows[1]"]),
        ({"micro_rows": (3, 1)}, ["micro_rows"]),
        ({"stages": (Stage(("a",), ()), Stage(("b",), (1,), (("c",),)))}, ["stages[0].ranks", "stages[1].recompute"]),
        ({"stages": TWICE}, ["stages[1].ranks[1]", "stages[0].ops[2]"]),
        ({"order": ("0F0 0I0 0W0 0F1 0B1", "1F0 1F1 1B0 1B1")}, []),
        ({"stages": WHOLE, "order": ("0F0 0B0 0F1 0I1 0W1", "1F0 1F1 1I0 1W0")}, ["order[0]"]),
        ({"order": ("0F0 0F9", "1F0 1F0", "1SF0>0", "2F0", "0F0.1", "0F01", "0f0")}, [f"order[{i}]" for i in range(7)]),
    ],
)
def test_everything_wrong_with_a_decision_is_found_with_its_place(change: dict[str, Any], paths: list[str]) -> None:
    wrong = replace(example().decision, **change)
    assert [path for path, _ in decision_problems(wrong)] == paths
    if not paths:
        return
    with pytest.raises(PlanError, match="the plan is not valid: ") as caught:
        check_decision(wrong)
    assert caught.value.where == paths[0]
    assert caught.value.why == (f"{len(paths) - 1} more problems" if len(paths) > 1 else "")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"schedule": ""}, "decision.schedule"),
        ({"step_ns": -1}, "outlook.step_ns"),
        ({"bubble": 1.5}, "outlook.bubble"),
        ({"estimates": example().estimates[:1]}, "outlook.estimates"),
        (
            {"estimates": (example().estimates[0], replace(example().estimates[1], live=-1))},
            "outlook.estimates[1].live",
        ),
    ],
)
def test_a_check_and_a_plan_file_find_the_same(change: dict[str, Any], path: str) -> None:
    wrong = changed(example(), **change)
    (found,) = problems(wrong)
    with pytest.raises(PlanError) as of_check:
        check(wrong)
    with pytest.raises(PlanFileError) as of_file:
        plan_from_json(plan_to_json(wrong))
    assert of_check.value.where == of_file.value.where == found[0] == path
    assert found[1] in of_check.value.what and found[1] == of_file.value.why


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ((("a", "b", "z"), ("c",)), "names op z, which the graph does not have"),
        ((("a",), ("c",)), "op b of the graph is in no stage"),
        ((("a", "c"), ("b",)), "value b flows back from stage 1 to stage 0"),
    ],
)
def test_a_decision_is_checked_against_its_graph(stages: tuple[tuple[str, ...], ...], what: str) -> None:
    g = graph("a <- x; b <- a; c <- b")
    decision = Decision(2, tuple(Stage(ops, (s,)) for s, ops in enumerate(stages)), (1,), "gpipe")
    assert check_decision(decision) is decision
    with pytest.raises(PlanError, match=what):
        check_decision(decision, g)


def test_an_op_that_learns_stands_in_one_stage_and_one_that_does_not_may_stand_in_several() -> None:
    two = Decision(2, (Stage(("a", "b"), (0,)), Stage(("a", "c"), (1,))), (1,), "gpipe")
    assert check_decision(two, graph("a- <- x; b <- a; c <- a b")) is two
    with pytest.raises(PlanError, match="op a is in stages 0 and 1"):
        check_decision(two, graph("a +w <- x; b <- a; c <- a b"))


def test_a_buffer_stays_with_the_op_that_updates_it() -> None:
    g = graph("a ~run =run <- x; b ~run <- a")
    stages = (Stage(("a",), (0,)), Stage(("b",), (1,)))
    with pytest.raises(PlanError, match="buffer run is used in stages 0, 1 and updated in one of them") as caught:
        check_decision(Decision(2, stages, (1,), "gpipe"), g)
    assert caught.value.fix == "keep a, b in one stage"


def test_a_plan_explains_itself() -> None:
    lines = stage_table(example(), width=200).splitlines()
    head = lines[0].removeprefix(" ")
    assert head.split("  ")[:4] == ["stage", "ranks", "ops", "recomputed"] and lines[1] == " " + "─" * len(head)
    first = "0 0 2 1 0.00 1.00 2.00 3.8 4.8 5.7 x 1 0.0 8.6 6.7 7.6 0.00"
    assert " ".join(lines[2].split()) == first and " ".join(lines[4].split()) == "all 0.01 2.00 4.00"
    assert lines[5:] == [
        "schedule 1f1b, 3 micro-batches of 4 (2x) and 3 (1x) rows, 2 stages on 3 ranks, 1 idle",
        "simulated, not measured: step 20.00 ms, bubble 25.0 %",
        "at most 5.0% of it could be saved: lower bound for this model on this cluster 19.00 ms",
        "memory in MiB; GFLOP, ms, in and out for one micro-batch",
        "op costs were measured on the device",
        "alternative, 1 stage: 25.00 ms, +25.0%",
        "note: rank 1 idles",
    ]


@given(plans())
def test_any_plan_explains_itself_as_the_table_without_a_graph_does(plan: Plan) -> None:
    assert plan.explain() == stage_table(plan, width=100)


def test_a_decision_and_a_report_print_as_one_short_line() -> None:
    ops = tuple(f"a_rather_long_name_of_an_op_{i}" for i in range(5000))
    wide = Decision(40, tuple(Stage(ops, (s,)) for s in range(40)), (4,) * 500 + (3,) * 100, "1f1b")
    assert str(example().decision) == "1f1b, 3 micro-batches of 4 3 rows, world 3, 2 stages: 2 ops on 0 | 1 ops on 2"
    assert repr(example().outlook) == "<Outlook simulated step 20.00 ms, bubble 25.0%, 1 notes, 1 alternatives>"
    for text in (str(wide), repr(wide), repr(example().outlook)):
        assert len(text) < 250 and "\n" not in text


def test_notes_are_added_behind_those_a_plan_has() -> None:
    assert example().with_notes("a", "b").notes == ("rank 1 idles", "a", "b")
    assert example().with_notes() == example()


def test_a_decision_says_which_modules_run_where() -> None:
    stages = tuple(replace(s, modules=(f"h.{i}", "n", f"h.{i + 3}")) for i, s in enumerate(example().stages))
    assert "2 stages: h.0 … h.3 on 0 | h.1 … h.4 on 2" in str(changed(example(), stages=stages).decision)
    assert changed(example(), stages=stages) == example()  # for people alone
