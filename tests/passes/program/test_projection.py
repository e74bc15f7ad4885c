"""A training plan followed in evaluation: every op runs where the plan holds what it reads."""

from __future__ import annotations

import pytest
from support.languages.parse import parse_decision, parse_graph

from autopart.ir.errors import PlanError
from autopart.passes.program.projection import project_plan

TRAINED = parse_graph("a:200000 +v ~count <- x; new:200000 =count <- a; b:200000 +w <- a")
PLAN = parse_decision("schedule 1f1b, micro-batches of 1 rows, world 2\nstage on 0: a new\nstage on 1: b")


def test_a_cheap_op_that_reads_a_buffer_of_one_stage_is_not_repeated_on_another():
    graph = parse_graph("cheap-:1 ~count <- x; big:1000000000 +w <- cheap")
    first, second = project_plan(graph, TRAINED, PLAN)
    assert (first.ops, second.ops) == (("cheap",), ("big",))


def test_an_op_that_needs_tensors_of_two_stages_is_refused():
    graph = parse_graph("both:1000 +w ~count <- x")
    with pytest.raises(PlanError, match="tensors that no stage"):
        project_plan(graph, TRAINED, PLAN)
