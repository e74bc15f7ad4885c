"""Reports: the table, the trace and the picture say what the plan and the timeline say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.plans import changed

from autopart.ir.actions import parse_action
from autopart.ir.graph import Graph, Op, Param, Size, module_range
from autopart.ir.plan import Alternative, Decision, Estimate, Optimality, Outlook, Plan, Provenance, Stage
from autopart.ir.timeline import Span, Timeline
from autopart.report.plan_table import modules_of, stage_table
from autopart.report.traces import chrome_trace, timeline_text

MIB = 2**20


def graph() -> Graph:
    """An embedding, four layers of two ops and a head tied to the embedding, with a mask that both halves use."""
    ops = [Op("mask", "m", module="encoder"), Op("emb", "e", params=("emb.weight",), module="emb")]
    for i in range(4):
        ops.append(Op(f"up{i}", "t", params=(f"h.{i}.up",), module=f"h.{i}.mlp.up"))
        ops.append(Op(f"down{i}", "t", params=(f"h.{i}.down", "scale"), module=f"h.{i}.mlp.down"))
    ops.append(Op("head", "t", params=("emb.weight",), module="head"))
    params = [Param("emb.weight", (100, 10), "float32", 4000), Param("scale", (5,), "float32", 20, kind="buffer")]
    params += [Param(f"h.{i}.{k}", (10, 10), "float32", 400) for i in range(4) for k in ("up", "down")]
    return Graph(Size(2), (), tuple(params), tuple(ops), (), ())


def plan() -> Plan:
    """Two stages on two of three ranks; the mask stands in both."""
    names = [op.name for op in graph().ops]
    first, second = (*names[:6],), ("mask", *names[6:])
    a = Estimate(1_000_000, 2_000_000, 3 * 10**9, 100 * MIB, 300 * MIB, 5 * MIB, 0, MIB // 4, 500 * MIB, 2)
    a = replace(a, workspace_bytes=7 * MIB, buffer_bytes=MIB // 2, reduce_ns=3_000_000, optimizer_ns=500_000)
    b = Estimate(1_500_000, 2_500_000, 4 * 10**9, 200 * MIB, 600 * MIB, 6 * MIB, MIB // 4, 0, 2048 * MIB)
    return Plan(
        Provenance("g", "s", "2.13.0"),
        Decision(3, (Stage(first, (0,)), Stage(second, (2,))), (4, 4, 3), "1f1b"),
        Outlook(20_000_000, 0.213, (a, b), ("rank 1 idles [see above]",)),
    )


def cells(line: str) -> list[str]:
    """Cells of a table line; they are two blanks apart."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_table_has_a_line_for_each_stage() -> None:
    lines = stage_table(plan(), graph(), width=200).splitlines()
    head = "stage ranks modules ops params GFLOP fwd_ms bwd_ms weights grad+opt act_x_live work peak in out end_ms"
    assert cells(lines[0]) == [name.replace("_", " ") for name in head.split()]
    assert (
        "|".join(cells(lines[2])) == "0|0|emb … h.1|6|1.4k|3.00|1.00|2.00|100.0|300.0|5.0 x 2|7.5|500.0|0.0|0.250|3.50"
    )
    assert (
        "|".join(cells(lines[3])) == "1|2|h.2 … head|6|1.4k|4.00|1.50|2.50|200.0|600.0|6.0 x 1|0.0|2048|0.250|0.0|0.00"
    )
    assert cells(lines[4]) == ["all", "11", "1.8k", "7.00", "2.50", "4.50"]


def test_the_footer_says_what_the_numbers_are() -> None:
    text = stage_table(plan())
    assert "schedule 1f1b, 3 micro-batches of 4 (2x) and 3 (1x) rows, 2 stages on 3 ranks, 1 idle" in text
    assert "simulated, not measured: step 20.00 ms, bubble 21.3 %" in text
    assert "op costs are analytic" in text
    assert "op costs were measured on the device" in stage_table(changed(plan(), costs="measured"))
    assert text.endswith("note: rank 1 idles [see above]\n")


def test_the_footer_says_how_far_from_the_best_a_plan_can_be() -> None:
    open_end = stage_table(changed(plan(), optimality=Optimality.of(20_000_000, 19_000_000)))
    assert "at most 5.0% of it could be saved: lower bound for this model on this cluster 19.00 ms" in open_end
    proved = stage_table(changed(plan(), optimality=Optimality.of(20_000_000, 21_000_000)))
    assert "proved best: lower bound for this model on this cluster 20.00 ms" in proved


def test_the_footer_names_what_was_not_taken() -> None:
    others = (Alternative("1 stage", 25_000_000, "+25.0%"), Alternative("data parallel alone", 0, "does not fit"))
    text = stage_table(changed(plan(), alternatives=others))
    assert "alternative, 1 stage: 25.00 ms, +25.0%\n" in text
    assert "alternative, data parallel alone: does not fit\n" in text


def test_replicas_and_recomputed_ops_are_counted() -> None:
    first, second = plan().stages
    wide = changed(
        plan(), world=4, schedule="pipedream", stages=(replace(first, ranks=(0, 1, 3), recompute=(("emb",),)), second)
    )
    lines = stage_table(wide, width=200).splitlines()
    assert cells(lines[0])[:4] == ["stage", "ranks", "ops", "recomputed"]
    assert cells(lines[2])[:4] == ["0", "0-1,3", "6", "1"] or cells(lines[2])[:4] == ["0", "0,1,3", "6", "1"]


def test_a_plan_without_modules_and_graph_shows_none() -> None:
    assert "modules" not in stage_table(plan()) and "params" not in stage_table(plan())


def test_without_estimates_there_are_no_numbers() -> None:
    lines = stage_table(changed(plan(), estimates=(), step_ns=0)).splitlines()
    assert cells(lines[0]) == ["stage", "ranks", "ops"]
    assert not any("simulated" in line or "MiB" in line for line in lines)


def test_one_stage_needs_no_sum() -> None:
    one = changed(plan(), stages=plan().stages[:1], estimates=plan().estimates[:1], micro_rows=(1,), world=1)
    text = stage_table(one)
    assert "\n all" not in text and "1 micro-batch of 1 row, 1 stage on 1 rank\n" in text


def test_a_narrow_terminal_gets_a_column_for_each_stage() -> None:
    lines = stage_table(plan(), graph(), width=80).splitlines()
    assert cells(lines[0]) == ["stage", "0", "1", "all"]
    assert ["peak", "500.0", "2048"] in [cells(line) for line in lines]
    assert max(len(line) for line in lines if "schedule" not in line) <= 80


def test_without_a_terminal_lines_of_the_table_have_at_most_100_characters() -> None:
    for stages in (2, 6, 40):
        names = [f"op{s}" for s in range(stages)]
        many = changed(
            plan(),
            world=stages,
            stages=tuple(Stage((name,), (s,)) for s, name in enumerate(names)),
            estimates=plan().estimates[:1] * stages,
        )
        for text in (stage_table(many), many.explain()):
            table = text[: text.index("schedule")].splitlines()
            assert max(map(len, table)) <= 100 and sum("peak" in line for line in table) == 1
            assert ("left out, for lines of 100 characters: " in text) == (stages == 40)


def test_modules_end_at_the_layer_and_leave_out_copies() -> None:
    assert module_range(modules_of(plan(), graph())[0]) == "emb … h.1"
    assert module_range(modules_of(plan(), graph())[1]) == "h.2 … head"
    two = changed(plan(), stages=(Stage(("mask", "up0", "down0", "up1"), (0,)), Stage(("mask",), (1,))))
    assert module_range(modules_of(two, graph())[0]) == "h.0, h.1"
    assert module_range(modules_of(two, graph())[1]) == "encoder"


def timeline(*spans: tuple[int, str, int, int]) -> Timeline:
    """A timeline of (rank, action, start, end)."""
    return Timeline(tuple(Span(rank, parse_action(text), start, end) for rank, text, start, end in spans), (7, 8))


STEP = timeline(
    (0, "0F0", 0, 10),
    (0, "0SF0>1", 10, 14),
    (0, "0F1", 10, 20),
    (0, "0SF1>1", 12, 22),
    (1, "1F0", 15, 25),
    (1, "1B0", 25, 45),
    (0, "0B0", 45, 58),
    (0, "0T", 58, 60),
)


def test_the_picture_is_to_scale() -> None:
    assert timeline_text(STEP, 60).splitlines() == [
        "rank 0 |F0--------F1--------.........................B0===========T+|",
        "rank 1 |...............F0--------B0==================...............|",
    ]


def test_a_rank_of_several_stages_has_them_named() -> None:
    step = timeline((0, "0F0", 0, 10), (0, "2F0", 10, 20), (0, "2O", 20, 30))
    assert timeline_text(step, 30) == "rank 0 |0F0-------2F0-------2O++++++++|\n"


def test_the_picture_of_nothing_is_empty() -> None:
    assert timeline_text(Timeline(())) == ""
    with pytest.raises(ValueError, match="width"):
        timeline_text(STEP, 0)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Ranks whose computes do not overlap and whose messages may."""
    spans = []
    for rank in range(draw(st.integers(1, 3))):
        now = 0
        for text in draw(st.lists(st.sampled_from(["F0", "F11", "B0", "SF0>3", "RB1<3", "T", "R", "O"]), max_size=12)):
            start, length = now + draw(st.integers(0, 20)), draw(st.integers(0, 20))
            action = parse_action(f"{rank}{text}")
            spans.append(Span(rank, action, start, start + length))
            now = start + length if len(action.kind) == 1 else now
    return Timeline(tuple(sorted(spans, key=lambda s: s.start_ns)))


@given(timelines(), st.integers(1, 120))
def test_the_picture_always_fits(steps: Timeline, width: int) -> None:
    lines = timeline_text(steps, width).splitlines()
    assert len(lines) == len({span.rank for span in steps.spans})
    assert all(len(line) == len(f"rank 0 |{'.' * width}|") for line in lines)


@given(timelines())
def test_a_trace_holds_every_span_and_lanes_do_not_overlap(steps: Timeline) -> None:
    events = json.loads(chrome_trace(steps))["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    found = sorted((e["pid"], e["name"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in drawn)
    assert found == sorted((s.rank, str(s.action), s.start_ns, s.end_ns) for s in steps.spans)
    assert all(
        (e["tid"] == 0) == (e["name"].lstrip("0123456789")[0] in "FBTO" or e["name"].endswith("R")) for e in drawn
    )
    lanes: dict[tuple[int, int], int] = {}
    for e in sorted(drawn, key=lambda e: (e["ts"], e["dur"])):
        assert round(e["ts"] * 1000) >= lanes.get((e["pid"], e["tid"]), 0)
        lanes[e["pid"], e["tid"]] = round((e["ts"] + e["dur"]) * 1000)


def test_a_trace_names_its_ranks() -> None:
    trace = json.loads(chrome_trace(STEP, name="simulated"))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert trace["otherData"] == {"name": "simulated", "step_ns": 60, "peak_bytes": [7, 8]}
    sent = next(e for e in trace["traceEvents"] if e["name"] == "0SF0>1")
    assert sent["args"] == {"stage": 0, "micro": 0, "slice": 0, "peer": 1} and sent["cat"] == "sending activations"
    summed = next(e for e in trace["traceEvents"] if e["name"] == "0T")
    assert summed["args"] == {"stage": 0} and summed["cat"] == "summing tied gradients"
