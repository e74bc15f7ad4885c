"""Plan files: equal plans are equal text, every broken file is refused with the place, nothing else escapes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from support.languages.plans import changed, example, plans

from autopart.files import documents
from autopart.files.plans import load_plan, match_plan, plan_from_json, plan_to_json, save_plan
from autopart.ir.errors import PlanError, PlanFileError
from autopart.ir.graph import Graph, Op, Param, Size, Value
from autopart.ir.plan import Alternative, Optimality, Plan, Stage, check
from autopart.report.plan_diff import diff_plans
from autopart.report.plan_table import stage_table


@given(plans())
def test_plans_survive_the_round_trip(plan: Plan) -> None:
    text = plan_to_json(check(plan))
    again = plan_from_json(text)
    assert again == plan and again.digest() == plan.digest()
    assert plan_to_json(again) == text


@given(plans(), plans())
def test_diff_is_empty_for_equal_plans_alone(a: Plan, b: Plan) -> None:
    assert diff_plans(a, a) == "the plans are equal"
    assert (diff_plans(a, b) == "the plans are equal") == (a == b)


def test_the_layout_is_one_op_a_line_and_numbers_side_by_side() -> None:
    lines = plan_to_json(example()).splitlines()
    assert lines[1] == '  "version": 4,'
    assert '          "b"' in lines and '        "ranks": [0],' in lines and '    "micro_rows": [2, 2],' in lines
    assert sum('"fwd_ns": 1, "bwd_ns": 2' in line for line in lines) == 2
    assert plan_to_json(example()).endswith("}\n")


BOTH_AGAIN = "decision.stages[0].recompute, decision.stages[1].recompute"


@pytest.mark.parametrize(
    ("old", "new", "where", "why"),
    [
        ('"ranks": [1]', '"ranks": ["1"]', "decision.stages[1].ranks[0]", "must be a valid integer, not '1'"),
        ('"ranks": [1]', '"ranks": [1.0]', "decision.stages[1].ranks[0]", "must be a valid integer, not 1.0"),
        ('"ranks": [1]', '"ranks": [true]', "decision.stages[1].ranks[0]", "must be a valid integer, not True"),
        ('"ranks": [1]', '"ranks": [2]', "decision.stages[1].ranks[0]", "rank 2 is outside 0..1"),
        ('"ranks": [1]', '"ranks": [0, 0]', "decision.stages[1].ranks[1]", "rank 0 appears twice in this stage"),
        ('"ranks": [1]', '"ranks": []', "decision.stages[1].ranks", "a stage needs a rank"),
        ('"ranks": [1]', '"ranks": null', "decision.stages[1].ranks", "must be a valid array, not None"),
        ('"b"', '"a"', "decision.stages[0].ops[1]", "op a appears twice in this stage"),
        ('"schedule": "1f1b"', '"schedule": ""', "decision.schedule", "a schedule needs a name"),
        ('"micro_rows": [2, 2]', '"micro_rows": []', "decision.micro_rows", "at least one micro-batch is needed"),
        ('"micro_rows": [2, 2]', '"micro_rows": [1, 0]', "decision.micro_rows[1]", "at least 1 row is needed, not 0"),
        (
            '"micro_rows": [2, 2]',
            '"micro_rows": [3, 1]',
            "decision.micro_rows",
            "differ by at most one row, not (3, 1)",
        ),
        ('"version": 4', '"version": 2', "version", "this release reads version 4"),
        ('"version": 4', '"version": true', "version", "this release reads version 4"),
        ('  "version": 4,', "", "version", "the key is missing"),
        ('"recompute": []', '"recompute": [["b"]]', "decision.stages[1].recompute", "or one that is not in the stage"),
        ('"recompute": []', '"recompute": [["b"], ["b"]]', BOTH_AGAIN, "names an op twice"),
        ('"recompute": []', '"recompute": true', BOTH_AGAIN, "must be a valid array"),
        ('"optimality": null', '"optimality": 3', "outlook.optimality", "must be"),
        ('"bubble": 0.0', '"bubble": 1.5', "outlook.bubble", "must be a share between 0 and 1, not 1.5"),
        ('"bubble": 0.0', '"bubble": 1e999', "outlook.bubble", "must be a finite number, not inf"),
        ('"bubble": 0.0', '"bubble": NaN', "outlook.bubble", "must be a finite number, not nan"),
        ('"bubble": 0.0', '"bubble": -Infinity', "outlook.bubble", "must be a finite number, not -inf"),
        ('"step_ns": 0', '"step_ns": -1', "outlook.step_ns", "must not be negative, not -1"),
        ('"step_ns": 0', '"step_ns": 0, "step_ns": 1', "outlook", "key 'step_ns' appears twice in one object"),
        ('"costs"', '"cost"', "provenance.cost", "unknown key"),
        ('"made by hand"', "made by hand", "line 52, column 7", "Expecting value"),
    ],
)
def test_an_edit_is_refused_with_its_place(old: str, new: str, where: str, why: str) -> None:
    text = plan_to_json(example())
    assert old in text
    with pytest.raises(PlanFileError) as caught:
        plan_from_json(text.replace(old, new), "p.json")
    assert caught.value.what.startswith("p.json ")
    assert (caught.value.where, why in caught.value.why) == (where, True), str(caught.value)


OLD = """{"version": 1, "graph_digest": "g", "structure_digest": "s", "torch_version": "2.13.0", "world": 2,
"stages": [{"ops": ["a"], "ranks": [0], "recompute": false}, {"ops": ["b"], "ranks": [1], "recompute": false}],
"micro_rows": [2], "schedule": "1f1b", "costs": "analytic", "step_ns": 0, "bubble": 0.0, "estimates": [], "notes": []}
"""
"""As release 0.1 wrote it."""


@pytest.mark.parametrize("text", [OLD, plan_to_json(example()).replace('"version": 4', '"version": 1')])
def test_a_plan_of_an_older_release_is_refused_by_its_version_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert (caught.value.what, caught.value.where) == (f"{path} has plan version 1", "version")
    assert caught.value.why == "this release reads version 4" and "make the plan again" in caught.value.fix


def test_every_problem_is_reported_at_once() -> None:
    text = plan_to_json(example()).replace('"ranks": [1]', '"ranks": ["x"]').replace('"world": 2', '"world": "y"')
    with pytest.raises(PlanFileError, match="2 problems") as caught:
        plan_from_json(text)
    assert caught.value.where == "decision.world, decision.stages[1].ranks[0]"


@pytest.mark.parametrize(
    "text",
    ["", "null", "3", "[]", "{}", '"plan"', '{"version": ' + "1" * 5000 + "}", plan_to_json(example())[:-2]],
)
def test_what_is_no_plan_at_all_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError):
        plan_from_json(text)


def test_absurd_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(example()))
    monkeypatch.setattr(documents, "MAX_BYTES", 100)
    with pytest.raises(PlanFileError, match="too large"):
        plan_from_json(path.read_text())
    with pytest.raises(PlanFileError, match="too large"):
        load_plan(path)


def test_legal_edits_are_accepted() -> None:
    plan = plan_from_json(plan_to_json(example()).replace('"schedule": "1f1b"', '"schedule": "gpipe"'))
    assert plan == changed(example(), schedule="gpipe")


def test_numbers_that_json_cannot_hold_are_not_written() -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        plan_to_json(changed(example(), bubble=float("nan")))


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(example(), path)
    save_plan(changed(example(), schedule="gpipe"), path)
    assert load_plan(path) == changed(example(), schedule="gpipe")
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(example(), path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanFileError, match="cannot write"):
        save_plan(changed(example(), schedule="gpipe"), path)
    assert load_plan(path) == example()
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(PlanError, match="at least one stage"):
        save_plan(changed(example(), stages=()), path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="No such file"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match="cannot be read"):
        load_plan(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFileError, match=r"not UTF-8 text\n  where: byte 0"):
        load_plan(tmp_path / "binary.json")


def small_graph(rows: int = 2, dtype: str = "float32", target: str = "t") -> Graph:
    """a -> b -> c on values of `rows` rows."""
    values = tuple(Value(name, (rows, 1), dtype, 4 * rows) for name in ("x", "va", "vb", "vc"))
    ops = tuple(
        Op(name, target, reads=(read,), writes=("v" + name,)) for name, read in (("a", "x"), ("b", "va"), ("c", "vb"))
    )
    return Graph(Size(rows), values, (), ops, ("x",), ("vc",))


def matching(graph: Graph) -> Plan:
    """The example plan, made for a graph."""
    return changed(example(), graph_digest=graph.shape_digest(), structure_digest=graph.structure_digest())


def test_a_plan_matches_what_it_was_made_for() -> None:
    match_plan(matching(small_graph()), small_graph(), torch_version="2.13.1", world=2)


@pytest.mark.parametrize(
    ("graph", "torch_version", "world", "why", "fix"),
    [
        (small_graph(target="u"), "2.13.0", 2, "another model", "autopart.plan"),
        (small_graph(rows=3), "2.13.0", 2, "another batch: its micro-batches have 2 rows, not 3", "autopart.plan"),
        (small_graph(dtype="float64"), "2.13.0", 2, "other shapes or dtypes", "autopart.plan"),
        (small_graph(), "2.14.0", 2, "made with 2.13.0+cpu, this is 2.14.0", "autopart.plan"),
        (small_graph(), "2.13.0", 4, "it is for 2, 4 run", "torchrun --standalone --nproc-per-node 2"),
    ],
)
def test_a_foreign_plan_is_refused(graph: Graph, torch_version: str, world: int, why: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        match_plan(matching(small_graph()), graph, torch_version=torch_version, world=world)
    assert why in caught.value.why and fix in caught.value.fix


@pytest.mark.parametrize(
    ("frozen", "says"),
    [
        ((), "requires_grad of 'enc.0.w, enc.0.b' has changed: now trained"),
        (("enc.0.w", "enc.0.b", "head.w"), "requires_grad of 'head.w' has changed: now frozen"),
    ],
)
def test_a_plan_made_before_a_freeze_names_the_parameters_that_changed(frozen: tuple[str, ...], says: str) -> None:
    def with_frozen(names: tuple[str, ...]) -> Graph:
        known = ("enc.0.w", "enc.0.b", "enc.1.w", "head.w")
        return replace(small_graph(), params=tuple(Param(n, (1,), "float32", 4, n not in names) for n in known))

    plan = matching(with_frozen(("enc.0.w", "enc.0.b")))
    with pytest.raises(PlanError, match=f"another model: {says}"):
        match_plan(plan, with_frozen(frozen), torch_version="2.13.0", world=2)


def test_a_plan_that_moves_an_op_wrongly_is_refused() -> None:
    moved = changed(matching(small_graph()), stages=(Stage(("a", "c"), (0,)), Stage(("b",), (1,))))
    with pytest.raises(PlanError, match="value vb flows back from stage 1 to stage 0"):
        match_plan(moved, small_graph(), torch_version="2.13.0", world=2)


def test_diff_names_what_changed() -> None:
    other = changed(
        example(),
        schedule="gpipe",
        micro_rows=(1, 1, 1, 1),
        stages=(Stage(("a",), (1,), (("a",),)), Stage(("b", "c"), (0,))),
        notes=(),
    )
    assert diff_plans(example(), other).splitlines() == [
        "schedule: 1f1b -> gpipe",
        "micro-batches: 2 of 2 rows -> 4 of 1 row",
        "stage 0 ranks: [0] -> [1]",
        "stage 0 recomputed ops: 0 -> 1",
        "stage 1 ranks: [1] -> [0]",
        "stage 0 -> stage 1: 1 op, b",
        f"no longer noted: {example().notes[0]}",
    ]


def test_diff_of_what_was_made_for_something_else_and_would_take_something_else() -> None:
    bound, other = Optimality.of(9_000_000, 8_000_000), (Alternative("1 stage", 9, ""),)
    named = [replace(stage, modules=("embed", f"layer.{s}")) for s, stage in enumerate(example().stages)]
    fuller = replace(example().estimates[0], peak_bytes=3 << 30, fwd_ns=2_000_000)
    before = changed(
        example(), step_ns=10_000_000, stages=tuple(named), estimates=(replace(fuller, peak_bytes=2 << 30),) * 2
    )
    changes = {"costs": "measured", "step_ns": 9_000_000, "optimality": bound, "alternatives": other}
    moved = (replace(named[0], ops=("a",)), replace(named[1], ops=("b", "c")))
    after = changed(before, **changes, estimates=(fuller, before.estimates[1]), stages=moved)
    assert diff_plans(before, after).splitlines() == [
        "costs: analytic -> measured",
        "stage 0 -> stage 1: 1 op of embed",
        "step: 10 ms -> 9 ms (-10.0%)",
        "lower bound: 0 ms -> 8 ms",
        "stage 0: peak 2 GiB -> 3 GiB (+50.0%)",
        "the alternatives differ",
    ]
    assert "fullest device: 2 GiB -> 0 GiB" in diff_plans(before, changed(before, estimates=()))


def test_whole_backwards_of_a_stage_are_in_the_file_the_table_and_the_difference() -> None:
    first, second = example().stages
    parted = changed(example(), schedule="zb-h1")
    whole = changed(parted, stages=(first, replace(second, whole_backward=True)))
    assert "whole_backward" not in plan_to_json(parted) and '"whole_backward": true' in plan_to_json(whole)
    assert plan_from_json(plan_to_json(whole)) == whole
    assert diff_plans(parted, whole) == "stage 1 backward: split -> whole"
    assert "backward" not in parted.explain()
    header, _, *rows = [line.split() for line in stage_table(whole, width=400).splitlines()]
    assert [row[header.index("backward")] for row in rows[:2]] == ["split", "whole"]
    assert ["backward", "split", "whole"] in [line.split() for line in stage_table(whole, width=60).splitlines()]
