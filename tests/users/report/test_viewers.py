"""What the simulator says of a whole step can be drawn: sums over replicas and ties, and the optimizer, too."""

from __future__ import annotations

import json

from support.languages.graphs import cluster, graph, source

from autopart.ir.actions import ACTIONS, UPDATE
from autopart.ir.plan import Decision, Stage
from autopart.ir.timeline import Timeline
from autopart.passes.program.routing import route
from autopart.passes.simulation.estimate import timeline_of
from autopart.passes.simulation.stage_costs import Estimator
from autopart.report.traces import chrome_trace, timeline_text


def whole_step(schedule: str = "1f1b") -> Timeline:
    """A step of two stages that share a parameter, the first of them on two ranks; it has every sum and message."""
    g = graph("a:300 #8 +tied:64 +w:128 <- x; b:400 #8 +tied:64 <- a")
    c = cluster(3, latency_ns=5)
    decision = Decision(3, (Stage(("a",), (0, 1)), Stage(("b",), (2,))), (1, 1, 1), schedule, zero=1)
    return timeline_of(decision, route(decision, g), Estimator(c, source(g, c).cost_model))


def test_the_trace_of_a_simulated_step_has_every_kind_of_action() -> None:
    whole, split = (whole_step(schedule) for schedule in ("1f1b", "zb-h1"))
    assert {span.action.kind for span in (*whole.spans, *split.spans)} == {
        name for name, kind in ACTIONS.items() if kind.role != UPDATE
    }
    for step in (whole, split):
        has_every_span(step)


def has_every_span(step: Timeline) -> None:
    drawn = [event for event in json.loads(chrome_trace(step))["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in drawn) == sorted(str(span.action) for span in step.spans)
    assert {event["cat"] for event in drawn} == {span.action.is_a.label for span in step.spans}


def test_the_picture_of_a_simulated_step_has_a_line_for_each_stage() -> None:
    lines = timeline_text(whole_step()).splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["rank 0", "rank 2"]  # the first rank of each
    assert all({"F", "-", "B", "=", "+"} <= set(line) for line in lines)
