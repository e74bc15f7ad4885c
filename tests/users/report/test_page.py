"""The HTML page of a plan: the numbers of the plan file, safe for any text, with the step and the memory of ranks."""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from support.languages.graphs import cluster, layers, plan_of
from support.languages.plans import changed, example, plans

from autopart.files.plans import plan_to_json
from autopart.ir.actions import RECEIVE, parse_action
from autopart.ir.errors import UsageError
from autopart.ir.plan import Alternative, Plan
from autopart.ir.timeline import Span, Timeline, read_spans, spans_text
from autopart.report.comparison import Answer
from autopart.report.critical_path import WAITING, critical_path, what_limits
from autopart.report.page.facts import alternatives, duration_text
from autopart.report.page.page import plan_fragment, plan_page

HOSTILE = "</script><script>alert(1)</script>\u2028<!-- &amp; \x1b[2J"


class Found(HTMLParser):
    """The exact numbers of each table by column, the elements, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.numbers: dict[str, list[float]] = {}
        self.tags: list[str] = []
        self._table = ""
        self.feed(page)
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        self.data: Any = json.loads(found[1])["picture"] if found else None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self._table = str(given.get("id")) if tag == "table" else self._table
        if exact := given.get("data-exact"):
            self.numbers.setdefault(self._table, []).append(float(exact))


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan_of(layers(6), cluster(4, memory=10**9), micros=8, rows=(2,) * 8, stages=2)


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "zb-h1"}, {"zero": 1}, {"policy": "turn", "replicas": 2}], ids=str
)
def test_the_numbers_are_those_of_the_plan_file(options: dict[str, Any]) -> None:
    planned = plan_of(layers(6), cluster(4, memory=10**9), micros=8, rows=(2,) * 8, stages=2, **options)
    plan = json.loads(plan_to_json(planned))
    outlook, page = plan["outlook"], plan_page(planned)
    found = Found(page)
    tiles = [
        outlook["step_ns"],
        outlook["bubble"],
        len(plan["decision"]["stages"]),
        len(plan["decision"]["micro_rows"]),
    ]
    assert found.numbers[""] == [*tiles, max(e["peak_bytes"] for e in outlook["estimates"])]
    stages, memory = [], []
    for s, (stage, e, limit) in enumerate(
        zip(plan["decision"]["stages"], outlook["estimates"], outlook["limits"], strict=True)
    ):
        stages += [s, len(stage["ops"]), e["fwd_ns"], e["bwd_ns"], e["reduce_ns"] + e["optimizer_ns"]]
        stages += [e["in_bytes"], e["out_bytes"]]
        memory += [s, e["param_bytes"], e["state_bytes"], e["activation_bytes"], e["live"]]
        memory += [e["workspace_bytes"] + e["buffer_bytes"], e["peak_bytes"], e["peak_bytes"] / limit]
    assert found.numbers["stages"] == stages
    assert found.numbers["memory"] == memory
    lost = [other["step_ns"] for other in outlook["alternatives"] if other["step_ns"]]
    each = [number for ns in lost for number in (ns, ns / outlook["step_ns"] - 1)]
    assert (lost or options) and found.numbers.get("alternatives", []) == ([outlook["step_ns"], *each] if lost else [])
    if outlook["optimality"] is not None:
        assert f"lower bound {duration_text(outlook['optimality']['lower_bound'])}" in page
    rounded = {duration_text(e[name]) for e in outlook["estimates"] for name in ("fwd_ns", "bwd_ns")}
    assert all(f">{text}<" in page or f">{text}\n" in page for text in rounded)


def test_the_picture_is_the_simulated_step_of_the_plan(planned: Plan) -> None:
    step, data = read_spans(planned.outlook.spans), Found(plan_page(planned)).data
    (panel,) = data["panels"]
    drawn = []
    for row in panel["rows"]:
        rank = int(row["label"].split()[1])
        begins = accumulate(row["gap"])
        lengths = [panel["lengths"][i] for i in row["long"]]
        drawn += [(rank, begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    assert sorted(drawn) == sorted((span.rank, span.start_ns, span.end_ns) for span in step.spans)
    assert data["step"] == planned.step_ns == step.step_ns
    assert sum(row["ranks"] for row in panel["rows"]) == sum(len(stage.ranks) for stage in planned.stages)


def test_what_was_asked_for_is_told_with_what_a_step_delivers(planned: Plan) -> None:
    graph, machines = layers(6), cluster(4, memory=10**9)
    answer = Answer("layers", machines, 128, planned, graph, {"float32": 10**9})
    page = plan_page(planned, answer=answer, options={"stages": 2}, about={"drawn": "today"})
    found, rates = Found(page), answer.delivered()
    assert rates is not None and {rates["tokens_per_s"], rates["mfu"]} <= set(found.numbers[""])
    assert "16 rows x 128 tokens" in page and "stages=2" in page and "today" in page
    assert f"{sum(math.prod(param.shape) for param in graph.params):,}" in page
    assert "4 x cpu with 953.7 MiB" in page and "over assumed peaks" in page
    named = replace(machines, devices=tuple(replace(device, name="A100") for device in machines.devices))
    assert "over the peak of all devices" in plan_page(planned, answer=replace(answer, cluster=named))


@pytest.mark.parametrize("bytes_per_s", [10**6, 10**15])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_limits_the_step_adds_up_to_it(schedule: str, replicas: int, bytes_per_s: int) -> None:
    """Without messages that take time each span of the chain begins when the one before it ends: nothing waits."""
    links = cluster(2 * replicas, memory=10**9, bytes_per_s=bytes_per_s, latency_ns=0 if bytes_per_s > 10**9 else 50)
    plan = plan_of(layers(8), links, micros=8, rows=(2,) * 8, schedule=schedule, replicas=replicas)
    step = read_spans(plan.outlook.spans)
    path = critical_path(step)
    assert path[-1].span.end_ns == step.step_ns
    for before, link in pairwise(path):
        assert before.span.end_ns <= link.from_ns <= link.span.end_ns
    found = what_limits(path, plan.step_ns)
    assert sum(found.values()) == plan.step_ns and all(ns > 0 for ns in found.values())
    if bytes_per_s > 10**9:
        assert WAITING not in found, found
    shown = Found(plan_page(plan))
    assert shown.numbers["limits"] == [number for ns in found.values() for number in (ns, ns / plan.step_ns)]
    marked = sum(len(row["path"]) for row in shown.data["panels"][0]["rows"])
    assert marked == len(path)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
def test_the_top_of_the_memory_curve_is_the_peak_of_the_plan(schedule: str) -> None:
    plan = plan_of(layers(8), cluster(2, memory=10**9), micros=8, schedule=schedule, replicas=1)
    for row in Found(plan_page(plan)).data["panels"][0]["rows"]:
        peaks = [plan.estimates[s].peak_bytes for s in row["stages"]]
        top, last = max(row["memory"]["levels"]), row["memory"]["level"][-1]
        assert max(peaks) <= top <= sum(peaks) and (len(peaks) > 1 or top == peaks[0])
        assert last == 0 and row["limit"] == 10**9  # all that was in flight is freed again


def test_texts_cannot_leave_their_place(planned: Plan) -> None:
    names = replace(planned.stages[0], modules=(HOSTILE, HOSTILE + "2"))
    plan = changed(planned, stages=(names, *planned.stages[1:]), notes=(HOSTILE,))
    plan = changed(plan, alternatives=(Alternative(HOSTILE, 1, HOSTILE),))
    for page in (plan_page(plan, title=HOSTILE), plan_fragment(plan, HOSTILE)):
        found = Found(page)
        assert "<script>alert" not in page and "\x1b" not in page and "\u2028" not in page
        assert found.tags.count("script") == (2 if "<html" in page else 0)
    assert "default-src 'none'" in plan_page(plan) and "http:" not in plan_page(plan).replace("http://www.w3.org", "")


def test_reasons_of_alternatives_do_not_repeat_their_percents(planned: Plan) -> None:
    reasons = ("+6.7% (its slowest stage is busy)", "-3.1%, in slices of 32 tokens", "+9.9%", "does not fit: 1 GiB")
    others = tuple(Alternative(f"plan {place}", planned.step_ns * 2, why) for place, why in enumerate(reasons))
    shown = alternatives(changed(planned, alternatives=others))
    assert shown is not None
    assert [row["why it was not taken"].text for row in shown.rows] == [
        "", "its slowest stage is busy", "in slices of 32 tokens", "slower", "does not fit: 1 GiB"
    ]  # fmt: skip


@given(plans())
@settings(max_examples=15)
def test_every_valid_plan_has_a_page(plan: Plan) -> None:
    found = Found(plan_page(plan))
    assert found.tags.count("table") >= 1 and found.data is None
    assert "simulated" in plan_page(plan) and "<table>" in plan_fragment(plan)


def test_a_measured_step_stands_beside_the_simulated_one(planned: Plan) -> None:
    step = read_spans(planned.outlook.spans)
    slower = Timeline(tuple(replace(s, start_ns=2 * s.start_ns, end_ns=2 * s.end_ns) for s in step.spans))
    found = Found(plan_page(planned, measured=slower, peaks={0: 123, 1: 77}, of_process=True))
    assert [panel["name"] for panel in found.data["panels"]] == ["simulated", "measured"]
    numbers = found.numbers["compared"]
    assert numbers[:2] == [planned.step_without_optimizer_ns, slower.step_ns]
    for s, e in enumerate(planned.estimates):
        assert numbers[3 + 6 * s : 6 + 6 * s] == [e.fwd_ns, 2 * e.fwd_ns, 1.0]
    assert 123 in found.numbers["memory"]
    assert "measured, whole process" in plan_page(planned, peaks={0: 123}, of_process=True)


def test_a_step_of_another_plan_is_refused(planned: Plan) -> None:
    for text in ("9F0", "0F99", "0F0.1"):
        other = Timeline((Span(0, parse_action(text), 0, 5),))
        with pytest.raises(UsageError, match="does not belong to this plan"):
            plan_page(planned, measured=other)


def test_of_very_many_actions_the_slowest_replicas_are_shown(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    step = read_spans(planned.outlook.spans)
    ranks = {rank: stage.ranks for stage in planned.stages for rank in stage.ranks}
    first = {own[0] for own in ranks.values()}
    every = [replace(s, rank=rank) for s in step.spans for rank in ranks[s.rank]]
    late = [replace(s, end_ns=s.end_ns + 10**9) if s.rank not in first else s for s in every]
    monkeypatch.setattr("autopart.report.page.rows.MOST_SPANS", len(step.spans))
    simulated, measured = Found(plan_page(planned, measured=Timeline(tuple(late)))).data["panels"]
    most = max(len(own) for own in ranks.values())
    assert most > 1 and len(measured["rows"]) == len(simulated["rows"])
    assert all(row["label"].endswith(f"(slowest of {row['ranks']})") for row in measured["rows"] if row["ranks"] > 1)
    shown = {int(row["label"].split()[1]) for row in measured["rows"]}
    assert not shown & {own[0] for own in ranks.values() if len(own) > 1}


@pytest.mark.parametrize(
    "options", [{"schedule": "pipedream"}, {"policy": "turn", "replicas": 2}, {"zero": 1}], ids=str
)
def test_any_kind_of_plan_has_a_picture(options: dict[str, Any]) -> None:
    plan = plan_of(layers(6), cluster(4, memory=10**9), micros=8, rows=(2,) * 8, stages=2, **options)
    (panel,) = Found(plan_page(plan)).data["panels"]
    assert sum(row["ranks"] for row in panel["rows"]) == sum(len(stage.ranks) for stage in plan.stages)
    assert "<table>" in plan_fragment(plan)


def test_a_plan_that_holds_no_step_says_so() -> None:
    assert "Nothing of this plan was simulated" in plan_page(example())
    assert "does not hold its simulated step" in plan_page(changed(example(), step_ns=5))


def test_plans_write_their_page_and_show_themselves_in_notebooks(planned: Plan, tmp_path: Path) -> None:
    path = planned.report(tmp_path / "plan.html")
    page = path.read_text()
    assert plan_page(planned, title="autopart: plan").split("<dl class=")[1] in page  # what is drawn besides is below
    for known in (platform.node(), f"Python {platform.python_version()}", f"{datetime.now(UTC):%Y-%m-}"):
        assert known in page and known not in plan_to_json(planned), known
    fragment = planned._repr_html_()
    assert fragment.count("<tr>") == 1 + len(planned.stages) and "<svg" in fragment and len(fragment) < 100_000
    with pytest.raises(UsageError, match=r"does not end in \.html"):
        planned.report(tmp_path / "plan.pdf")
    with pytest.raises(UsageError, match="cannot write"):
        planned.report(tmp_path / "none" / "plan.html")


def test_spans_are_written_and_read_again(planned: Plan) -> None:
    step = read_spans(planned.outlook.spans)
    assert spans_text(step) == planned.outlook.spans
    assert {span.action.kind for span in step.spans} >= {"F", "B", "SF", "SB", "O"}
    assert not any(span.action.is_a.role == RECEIVE for span in step.spans)
