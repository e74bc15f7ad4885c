"""The rows of the picture: what each worker does over a step, in few characters.

Equal replicas do the same at the same time, so that a simulated step has one row for all of them.  Of a measured step
with very many actions the slowest replica of each stage is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopart.ir.actions import ACTIONS, RECEIVE
from autopart.ir.errors import printable
from autopart.ir.plan import Plan
from autopart.ir.timeline import MOST_SPANS, Span, Timeline, computing_ns
from autopart.report.page.memory import memory_curve

Json = dict[str, object]

SIMULATED, MEASURED = "simulated", "measured"
"""Names of the panels."""
SENDS = {"SF": "f", "SB": "b"}
"""Letters of messages in a row; every other action is its own letter."""


def picture(panels: Mapping[str, Timeline], plan: Plan) -> Json:
    """Return the data of the picture, a panel for each timeline.

    Times are nanoseconds.  A row has a letter for each span, and lists beside it: `micro` (micro-batch * slices +
    slice), `gap` (from the start of the span before) and `long` (number of its length in `lengths`).
    """
    labels = {SENDS.get(kind, kind): row.label for kind, row in ACTIONS.items() if row.role != RECEIVE}
    return {
        "slices": plan.decision.slices,
        "labels": labels,
        "step": max((timeline.step_ns for timeline in panels.values()), default=0),
        "panels": [_panel(name, timeline, plan) for name, timeline in panels.items()],
    }


def _panel(name: str, timeline: Timeline, plan: Plan) -> Json:
    simulated = name == SIMULATED
    shown = (span for span in timeline.spans if span.action.is_a.role != RECEIVE)
    spans = Timeline(tuple(shown)).by_rank()
    if sum(map(len, spans.values())) > MOST_SPANS:
        spans = {rank: spans[rank] for rank in _slowest(spans, plan)}
    lengths = sorted({span.ns for own in spans.values() for span in own})
    place = {length: i for i, length in enumerate(lengths)}
    many = "x" if simulated else "slowest of "
    rows = [_row(rank, own, plan, place, set(spans), many) for rank, own in spans.items()]
    return {"name": printable(name), "step": timeline.step_ns, "lengths": lengths, "rows": rows}


def _slowest(spans: Mapping[int, list[Span]], plan: Plan) -> list[int]:
    """Return of the ranks that run the same stages the one that computes longest, ascending."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, own in spans.items():
        stages = plan.decision.stages_of_rank(rank)
        found[stages] = max(found.get(stages, (-1, 0)), (computing_ns(own), -rank))
    return sorted(-rank for _, rank in found.values())


def _row(rank: int, spans: list[Span], plan: Plan, place: Mapping[int, int], shown: set[int], many: str) -> Json:
    """Return the row of a rank.  shown: the ranks that have rows.  many: what stands before their number."""
    decision = plan.decision
    stages = decision.stages_of_rank(rank)
    alike = equal_ranks(plan, rank, shown)
    row: Json = {
        "label": f"rank {rank}" if alike == 1 else f"rank {rank} ({many}{alike})",
        "ranks": alike,
        "stages": list(stages),
        "kinds": "".join(SENDS.get(span.action.kind, span.action.kind) for span in spans),
        "micro": [max(0, span.action.micro) * decision.slices + span.action.slot.slice for span in spans],
        "gap": _gaps(span.start_ns for span in spans),
        "long": [place[span.ns] for span in spans],
    }
    if len(stages) > 1:
        row["stage"] = [span.action.stage for span in spans]
    if peers := {i: span.action.peer for i, span in enumerate(spans) if _far(span)}:
        row["peers"] = peers
    if plan.estimates:
        curve = memory_curve(spans, decision, plan.estimates)
        levels = sorted({size for _, size in curve})
        row["memory"] = {
            "gap": _gaps(moment for moment, _ in curve),
            "levels": levels,
            "level": [levels.index(size) for _, size in curve],
        }
        limits = [plan.outlook.limits[s] for s in stages if s < len(plan.outlook.limits)]
        row["limit"] = min(limits, default=0)
    return row


def equal_ranks(plan: Plan, rank: int, shown: set[int]) -> int:
    """Return how many ranks the row of a rank stands for: those that run the same stages and have no row."""
    stages = plan.decision.stages_of_rank(rank)
    if not stages:
        return 1
    return 1 + sum(other not in shown for other in plan.decision.stages[stages[0]].ranks)


def _far(span: Span) -> bool:
    """Whether a message goes to another stage than the next one of its way."""
    action = span.action
    usual = action.stage + (1 if action.kind == "SF" else -1)
    return action.peer is not None and action.peer != usual


def _gaps(moments: Iterable[int]) -> Sequence[int]:
    found, before = [], 0
    for moment in moments:
        found.append(moment - before)
        before = moment
    return found
