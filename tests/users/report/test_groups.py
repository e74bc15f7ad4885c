"""What is said of plans whose stages are divided among groups counts ranks, pieces and replicas as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tokens.by_hand import Gpt

import autopart
from autopart import api
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.files.traces import load_trace
from autopart.ir.timeline import Timeline, read_spans, spans_text
from autopart.options import read_options
from autopart.report.comparison import comparison_facts, comparison_table
from autopart.report.page.page import plan_page
from autopart.report.page.rows import rank_peaks
from autopart.report.plan_diff import diff_plans
from autopart.report.plan_table import plan_facts, stage_table
from autopart.report.traces import timelines_text


def planned(cluster: str = "cpu:8", **given: Any) -> tuple[autopart.Plan, Any]:
    torch.manual_seed(0)
    ids = torch.zeros((8, 8), dtype=torch.long)
    asked = {"costs": "analytic", "tensor_parallel": 2, "stages": 2, "replicas": 2, "micro_batches": 4, **given}
    return api.planned(Gpt(width=256).double(), cluster, (ids, ids), read_options(**asked))


def test_the_table_says_which_ranks_compute_together_and_what_all_of_them_compute() -> None:
    plan, graph = planned()
    whole, _ = planned(tensor_parallel=1)
    text = stage_table(plan, graph, width=200)
    assert "0-3 in groups of 2" in text and "4-7 in groups of 2" in text
    assert "2 stages on 8 ranks, each divided among 2 ranks (tensor parallelism), 2 copies of the pipeline" in text
    facts = plan_facts(plan, graph)
    assert (facts["tensor_parallel"], facts["copies"]) == (2, 2)
    totals = [re.search(r"^ all .*?(\d+\.\d\d)", stage_table(each, graph, width=200), re.M) for each in (plan, whole)]
    assert all(totals) and float(totals[0][1]) >= float(totals[1][1]) > 0  # what is whole is computed by each
    assert plan.estimates[0].param_bytes < whole.estimates[0].param_bytes
    alone, _ = planned("cpu:4", replicas=1)
    assert " in groups" not in stage_table(alone, graph)


def test_the_simulated_step_has_rows_of_ranks() -> None:
    plan, _ = planned()
    spans = read_spans(plan.outlook.spans)
    assert set(spans.by_rank()) == {0, 4}
    assert {span.action.stage for span in spans.by_rank()[4] if span.action.kind in "FB"} == {1}
    peaks = rank_peaks(plan)
    assert len(peaks) == 8 and peaks[:4] == (plan.estimates[0].peak_bytes,) * 4
    page = plan_page(plan)
    assert '"rank 4 (x4)"' in page and "2 ranks divide the weights and the work of each replica" in page
    assert "in groups of 2" in page
    same = plan_from_json(plan_to_json(plan))
    assert same == plan and same.outlook.spans == plan.outlook.spans


def test_a_step_of_groups_is_simulated_for_each_of_their_ranks(tmp_path: Path) -> None:
    ids = torch.zeros((8, 8), dtype=torch.long)
    plan, (alone, _) = planned()[0], planned("cpu:4", tensor_parallel=1)
    step, whole = (
        autopart.simulate(p, Gpt(width=256).double(), f"cpu:{p.decision.world}", sample=(ids, ids))
        for p in (plan, alone)
    )
    assert step.step_ns == plan.step_ns
    own = step.by_rank()
    assert own.keys() == {0, 1, 4, 5}  # the first replica of each stage
    for rank in (0, 4):
        first, second = ([(s.action, s.start_ns, s.end_ns) for s in own[r]] for r in (rank, rank + 1))
        assert first == second
    assert spans_text(Timeline((*own[0], *own[4]))) == plan.outlook.spans
    assert step.bubble == pytest.approx(Timeline((*own[0], *own[4])).bubble)
    sent, of_all = ({s.ns for s in each.spans if s.action.kind == "SF"} for each in (step, whole))
    assert 0 < max(sent) < min(of_all)  # each rank sends its part, to one of the other group
    assert len(step.peak_bytes) == 8 and len(set(step.peak_bytes[:4])) == 1 and min(step.peak_bytes) > 0
    autopart.save_trace(step, tmp_path / "step.json")
    assert set(load_trace(tmp_path / "step.json").spans) == set(step.spans)
    assert timelines_text({"simulated": step}).count("rank ") == 4


def test_notes_and_errors_count_ranks_and_groups() -> None:
    plan, _ = planned("cpu:8", replicas=1)
    assert "4 of 8 devices idle: 2 stages were asked for" in plan.notes
    with pytest.raises(autopart.UsageError, match="2 stages need 2 groups of 4 devices, but the cluster has 1"):
        planned("cpu:4", tensor_parallel=4, replicas=1)


def test_differences_name_the_groups() -> None:
    plan, _ = planned()
    other, _ = planned(tensor_parallel=4, replicas=1)
    text = diff_plans(plan, other)
    assert "tensor_parallel: 2 -> 4" in text and "stage 0 replicas: 2 -> 1" in text
    assert "ranks" not in text  # they are the same


def test_what_if_compares_groups() -> None:
    ids = torch.zeros((8, 8), dtype=torch.long)
    asked = {"costs": "analytic", "stages": 2, "replicas": 2, "micro_batches": 4}
    questions = [(f"t={t}", "cpu:8", read_options(**asked, tensor_parallel=t)) for t in (1, 2, 3)]
    answers = list(api.answered(Gpt().double(), (ids, ids), questions))
    text = comparison_table(answers, "what if")
    assert "2 stages x 2 x 2 (tensor parallel), 4 micro-batches" in text and "t=3: " in text
    facts: Any = comparison_facts(answers)["answers"]
    assert [each.get("tensor_parallel") for each in facts] == [1, 2, None]
    assert facts[1]["replicas"] == [2, 2] and json.dumps(facts)


def test_the_bound_of_auto_is_that_of_the_group_size_that_may_be_fastest() -> None:
    given = {"stages": 1, "replicas": None}
    best, _ = planned("cpu:2", tensor_parallel="auto", **given)
    each = [planned("cpu:2", tensor_parallel=t, **given)[0] for t in (1, 2)]
    least = min(plan.outlook.optimality.lower_bound for plan in each)
    assert best.outlook.optimality.lower_bound == min(least, best.step_ns)
