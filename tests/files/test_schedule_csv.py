"""CSV files of schedules: what is read, what is refused and where, what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, plan_of

import autopart
from autopart.files.limits import MAX_VALUES
from autopart.files.schedule_csv import read_schedule_csv, schedule_to_csv
from autopart.ir.actions import parse_action
from autopart.ir.errors import ProgramError, UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Edge, Program
from autopart.options import read_options

MODEL = graph("a:3 +w #4 <- x; b:3 +v #4 <- a; c:3 +u #4 <- b; d:3 +t #4 <- c")
SMALL = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1I1,1W1\n"


def read(text: str, folder: Path) -> list[list[str]]:
    """Return the computes of each line of a file with this text."""
    (folder / "s.csv").write_text(text)
    return [[str(action) for action in row] for row in read_schedule_csv(folder / "s.csv")]


def test_bubbles_messages_gathers_and_pairs_leave_the_computes(tmp_path: Path) -> None:
    plain = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1I1", "1W1"]]
    assert read(SMALL, tmp_path) == plain
    full = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r\n\r\n"
    full += "1RECV_F0, 1F0 ,1RECV_F1,(1B0;1F1)OVERLAP_F_B,1SEND_B0,1I1,1SEND_B1,1W1\r\n"
    assert read(full, tmp_path) == plain


@pytest.mark.parametrize(
    "text, where, why",
    [
        ("", "the file", "0 computes are too few for 0 stages"),
        (",,\n", "the file", "0 computes are too few"),
        ("0F0,0X0\n", "line 1, column 2", "'0X0' is not an action"),
        ("0F0.1,0B0\n", "line 1, column 1", "is not an action"),
        ("0F0,0B0,0F٣\n", "line 1, column 3", "is not an action"),
        ("0F0,(0B0;(0F1;0B1)OVERLAP_F_B)OVERLAP_F_B\n", "line 1, column 2", "is not an action"),
        ("0F0,0B0,0F9999999\n", "line 1, column 3", "is not an action"),
        ("0F0,0B\n", "line 1, column 2", "is not an action"),
        ("0F0,0UNSHARD1\n", "line 1, column 2", "is not an action"),
        ("0B0,0F0\n", "line 1, column 1", "0B0 comes after nothing"),
        ("0F0,0F0,0B0\n", "line 1, column 2", "0F0 comes after 0F0"),
        ("0F0,0B0,0B0\n", "line 1, column 3", "0B0 comes after 0B0"),
        ("0F0,0W0,0I0\n", "line 1, column 2", "0W0 comes after 0F0"),
        ("0F0,0I0,0B0\n", "line 1, column 3", "0B0 comes after 0I0"),
        ("0F0,0I0\n", "the file", "the backward of weights of stage 0, micro-batch 0 is missing"),
        ("0F0,0F1,0B1\n", "the file", "the backward or backward of inputs of stage 0, micro-batch 0 is missing"),
        ("0F0,0B0\n0F1,0B1\n", "line 2, column 1", "0F1 is in line 2, other computes of its stage are in line 1"),
        ("0F0,0B0\n2F0,2B0\n", "the file", "the forward of stage 1, micro-batch 0 is missing"),
        ("0F999999,0B999999\n", "the file", "too few for 1 stages and 1000000 micro-batches"),
        ('0F0,"0B0\n', "line 1", "unexpected end of data"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text: str, where: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(text, tmp_path)
    assert where in caught.value.where and why in caught.value.why


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is too large"):
        read("," * (MAX_VALUES + 1), tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        autopart.register_schedule(tmp_path / "none.csv")


@settings(max_examples=60)
@given(st.data())
def test_any_order_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    stages, micros = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    homes = [data.draw(st.integers(0, 2)) for _ in range(stages)]
    left = {(s, m): list(data.draw(st.sampled_from(["FB", "FIW"]))) for s in range(stages) for m in range(micros)}
    order = []
    while left:
        stage, micro = data.draw(st.sampled_from(sorted(left)))
        order.append(parse_action(f"{stage}{left[stage, micro].pop(0)}{micro}"))
        left = {slot: kinds for slot, kinds in left.items() if kinds}
    program = Program(micros, 3, tuple((home,) for home in homes), tuple(order))
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    path.write_text(schedule_to_csv(program))
    wanted = {home: tuple(a for a in order if homes[a.stage] == home) for home in dict.fromkeys(homes)}
    assert read_schedule_csv(path) == tuple(wanted.values())


def test_messages_stand_on_both_lines_at_their_place_in_the_order() -> None:
    texts = ["0F0", "0SF0>1", "1F0", "1SF0>2", "2F0", "2B0", "2SB0>1", "1I0", "1SB0>0", "0B0", "1W0"]
    order = tuple(parse_action(text) for text in texts)
    links = (Edge(0, 1, ("x",), ("x",)), Edge(1, 2, ("x",), ("x",)))
    text = schedule_to_csv(Program(1, 2, ((0,), (1,), (1,)), order, links), messages=True)
    assert text.splitlines() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,2UNSHARD,2F0,2B0,2REDUCE_GRAD,2RESHARD,1I0,1SEND_B0,1W0,1REDUCE_GRAD,1RESHARD",
    ]


def plan(schedule: str = "1f1b", micros: int = 3, stages: int = 2) -> Plan:
    return plan_of(MODEL, cluster(2), stages=stages, micros=micros, schedule=schedule)


def test_what_these_files_cannot_say_is_refused(tmp_path: Path) -> None:
    far = Program(1, 3, ((0,), (1,), (2,)), (), (Edge(0, 2, ("x",), ("x",)),))
    with pytest.raises(UsageError, match="cannot be written") as caught:
        schedule_to_csv(far, messages=True)
    assert "from stage 0 to 2" in caught.value.why
    sliced = replace(plan(), decision=replace(plan().decision, token_slices=(2, 2)))
    with pytest.raises(UsageError, match="cannot be written") as caught:
        autopart.save_schedule(sliced, tmp_path / "s.csv")
    assert "slices" in caught.value.why
    stages = plan().stages
    turns = replace(plan().decision, world=3, stages=(replace(stages[0], ranks=(0, 2), policy="turn"), stages[1]))
    with pytest.raises(UsageError, match="cannot be written") as caught:
        autopart.save_schedule(replace(plan(), decision=turns), tmp_path / "s.csv")
    assert "in turn" in caught.value.why
    with pytest.raises(UsageError, match="cannot write"):
        autopart.save_schedule(plan(), tmp_path / "none" / "s.csv")
    assert not (tmp_path / "s.csv").exists()


def test_a_loaded_schedule_is_planned_with_the_sizes_of_its_file(tmp_path: Path) -> None:
    autopart.save_schedule(plan("1f1b-deep"), tmp_path / "saved.csv")
    assert read_options(schedule=tmp_path / "saved.csv").schedule == "saved"
    assert plan("saved").step_ns == plan("1f1b-deep").step_ns
    with pytest.raises(ProgramError, match="schedule saved is for 2 stages and 3 micro-batches, not 2 and 4") as caught:
        plan("saved", micros=4)
    assert "stages=2, micro_batches=3" in caught.value.fix


def test_a_file_whose_ranks_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    (tmp_path / "crossed.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ProgramError, match="schedule crossed can never end"):
        autopart.register_schedule(tmp_path / "crossed.csv")


def test_a_built_in_schedule_cannot_be_replaced_by_a_file(tmp_path: Path) -> None:
    autopart.save_schedule(plan(), tmp_path / "1f1b.csv")
    with pytest.raises(UsageError, match="the name '1f1b' is taken"):
        autopart.register_schedule(tmp_path / "1f1b.csv")
    assert autopart.register_schedule(tmp_path / "1f1b.csv", name="other").name == "other"
