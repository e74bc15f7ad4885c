"""Schedules of torch.distributed.pipelining run here, and its loader and checks accept ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.extending.own_interleaving import OPTIONS, batch, net
from support.languages.graphs import graph
from support.languages.torch_schedules import LOOPED, V_SHAPED, computes, dump, home, load, simulated, verified_under
from support.oracles.strict import hangs, issued
from support.workers import Workers

import autopart
from autopart.ir.errors import UsageError
from autopart.ir.plan import Decision, Outlook, Plan, Provenance, Stage
from autopart.ir.program import Program
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program

FORMS = ("compute_only", "compute_comms")


def planned(name: str, ranks: int, each: int, micros: int, schedule: str) -> tuple[Plan, Program]:
    """Return a plan of a chain of stages on torch's ranks, and its proven program."""
    count = ranks * each
    model = graph("; ".join(f"v{s}:3 +w{s} #4 <- {f'v{s - 1}' if s else 'x'}" for s in range(count)))
    stages = tuple(Stage((f"v{s}",), (home(name, s, ranks),)) for s in range(count))
    decision = Decision(ranks, stages, (1,) * micros, schedule)
    return Plan(Provenance("g", "s", "2.13.0"), decision, Outlook()), check_program(route(decision, model))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks, micros", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", [*LOOPED, *V_SHAPED])
def test_schedules_of_torch_are_proven_here_and_return_unchanged(
    name: str, ranks: int, micros: int, form: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.csv", tmp_path / "ours.csv"
    dump(name, ranks, 2, micros, theirs, form)
    schedule = autopart.register_schedule(theirs, name=name)
    assert schedule.placement == ("v" if name in V_SHAPED else "loop")
    assert schedule.splits == (name not in ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B"))
    plan, program = planned(name, ranks, 2, micros, schedule.name)
    assert hangs(issued(program)) == []
    if form == FORMS[1]:
        assert [list(map(str, row)) for row in schedule.order(2 * ranks, micros)] == single(
            computes(load(theirs, ranks, 2, micros, form))
        )
    autopart.save_schedule(plan, ours, messages=form == FORMS[1])
    back = load(ours, ranks, 2, micros, form)
    assert simulated(back) > 0
    assert computes(back) == single(computes(load(theirs, ranks, 2, micros, form)))


def single(orders: list[list[str]]) -> list[list[str]]:
    """Return orders with pairs of computes apart."""
    return [
        [part for item in order for part in item.removesuffix("OVERLAP_F_B").strip("()").split(";")] for order in orders
    ]


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-deep", "gpipe"])
def test_built_in_schedules_are_loaded_by_torch(schedule: str, messages: bool, tmp_path: Path) -> None:
    plan, program = planned("", 3, 1, 5, schedule)
    autopart.save_schedule(plan, tmp_path / "ours.csv", messages=messages)
    there = load(tmp_path / "ours.csv", 3, 1, 5, FORMS[messages])
    assert simulated(there) > 0
    assert computes(there) == [[str(a) for a in program.part(rank) if a.is_a.role == "compute"] for rank in range(3)]


def test_an_order_that_torch_refuses_is_refused_with_line_and_column(tmp_path: Path) -> None:
    """The order that torch 2.13 shows for Schedule1F1B counts the last stage's forwards from 1."""
    dump("Schedule1F1B", 2, 1, 4, tmp_path / "wrong.csv")
    text = (tmp_path / "wrong.csv").read_text()
    if "1F0" in text:
        pytest.skip("this torch counts them from 0")
    with pytest.raises(UsageError, match="is not a schedule") as caught:
        autopart.register_schedule(tmp_path / "wrong.csv")
    assert caught.value.where == "line 2, column 2" and "1B0 comes after nothing" in caught.value.why
    with pytest.raises(AssertionError, match="without first running Forward"):
        load(tmp_path / "wrong.csv", 2, 1, 4)


@pytest.mark.parametrize("name", LOOPED)
def test_a_schedule_of_torch_is_planned_with_the_placement_of_its_file(name: str, tmp_path: Path) -> None:
    dump(name, 2, 2, 4, tmp_path / "theirs.csv")
    plan = autopart.plan(
        net(tied=False), "cpu:2", sample=batch(), schedule=tmp_path / "theirs.csv", stages=4, micro_batches=4, **OPTIONS
    )
    assert [stage.ranks for stage in plan.stages] == [(home(name, stage, 2),) for stage in range(4)]
    assert plan.schedule == "theirs" and plan.step_ns > 0


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_a_schedule_of_torch_runs_as_one_process(pair: Workers, name: str, tmp_path: Path) -> None:
    dump(name, 2, 2, 4, tmp_path / "theirs.csv")
    expected = single(computes(load(tmp_path / "theirs.csv", 2, 2, 4)))
    for ok, errors, orders in pair.run(verified_under, tmp_path / "theirs.csv"):
        assert ok, errors
        assert orders == expected
