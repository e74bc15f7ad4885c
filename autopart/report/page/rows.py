"""The rows of the picture: what each worker does over a step, in few characters, and what it holds, in bytes.

Equal replicas do the same at the same time, so that a simulated step has one row for all of them.  Of a measured step
with very many actions the slowest replica of each stage is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from autopart.ir.actions import ACTIONS, HOLDING, RECEIVE, Action
from autopart.ir.errors import printable
from autopart.ir.plan import Decision, Estimate, Plan
from autopart.ir.timeline import MOST_SPANS, Span, Timeline, computing_ns, read_spans
from autopart.report.critical_path import Link

Json = dict[str, object]

SIMULATED, MEASURED = "simulated", "measured"
"""Names of the panels."""
SENDS = {"SF": "f", "SB": "b"}
"""Letters of messages in a row; every other action is its own letter."""


def picture(panels: Mapping[str, Timeline], plan: Plan, path: Sequence[Link] = ()) -> Json:
    """Return the data of the picture, a panel for each timeline.  path: the longest chain of the simulated step.

    Times are nanoseconds.  A row has a letter for each span, and lists beside it: `micro` (micro-batch * slices +
    slice), `gap` (from the start of the span before) and `long` (number of its length in `lengths`).  `path` numbers
    the spans of the chain.
    """
    chain = frozenset((link.span.rank, link.span.action) for link in path)
    labels = {SENDS.get(kind, kind): row.label for kind, row in ACTIONS.items() if row.role != RECEIVE}
    return {
        "slices": plan.decision.slices,
        "labels": labels,
        "step": max((timeline.step_ns for timeline in panels.values()), default=0),
        "panels": [_panel(name, timeline, plan, chain) for name, timeline in panels.items()],
    }


def _panel(name: str, timeline: Timeline, plan: Plan, chain: frozenset[tuple[int, Action]]) -> Json:
    simulated = name == SIMULATED
    shown = (span for span in timeline.spans if span.action.is_a.role != RECEIVE)
    spans = Timeline(tuple(shown)).by_rank()
    if sum(map(len, spans.values())) > MOST_SPANS:
        spans = {rank: spans[rank] for rank in _slowest(spans, plan)}
    lengths = sorted({span.ns for own in spans.values() for span in own})
    place = {length: i for i, length in enumerate(lengths)}
    many = "x" if simulated else "slowest of "
    rows = [_row(rank, own, plan, place, set(spans), many) for rank, own in spans.items()]
    for row, (rank, own) in zip(rows, spans.items(), strict=True) if simulated else ():
        row["path"] = [i for i, span in enumerate(own) if (rank, span.action) in chain]
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
    replicas = decision.stages[stages[0]].ranks if stages else ()
    alike = 1 + sum(other not in shown for other in replicas)  # the row stands for replicas without one
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
    peers = {i: span.action.peer for i, span in enumerate(spans) if span.action.peer is not None}
    usual = [span.action.stage + (1 if span.action.kind == "SF" else -1) for span in spans]
    if far := {i: peer for i, peer in peers.items() if peer != usual[i]}:
        row["peers"] = far
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


def _gaps(moments: Iterable[int]) -> Sequence[int]:
    return [after - before for before, after in pairwise([0, *moments])]


# ---- memory ---------------------------------------------------------------------------------------------------------

Curve = tuple[tuple[int, int], ...]
"""(nanoseconds, bytes) where the bytes change; the first at the start of the step."""


def memory_curve(spans: Sequence[Span], decision: Decision, estimates: Sequence[Estimate]) -> Curve:
    """Return what a worker holds over the step: all that does not change, and what is in flight.

    spans: of the worker.  A forward takes the activations of its micro-batch (of a slice: its part) at its start, and
    its backward frees them at its end.  The rest (weights, gradients, optimizer state, messages, the largest workspace)
    is what the estimates add to the most that is in flight, so that the top of the curve of a worker with one stage is
    its `peak_bytes`.  O(spans * log spans).
    """
    changes: list[tuple[int, int, int]] = []  # nanoseconds, stage, bytes
    for span in spans:
        held, kept = HOLDING.get(span.action.kind, (0, 0))
        if held or kept:
            known = estimates[span.action.stage]
            size = (held * known.activation_bytes + kept * known.weight_bytes) // decision.slices
            changes.append((span.start_ns if held > 0 else span.end_ns, span.action.stage, size))
    changes.sort()
    stages = sorted({stage for _, stage, _ in changes})
    now = _constant_bytes(stages, changes, estimates)
    curve = [(0, now)]
    for moment, _, size in changes:
        now += size
        if curve[-1][0] == moment:
            curve[-1] = (moment, now)
        else:
            curve.append((moment, now))
    return tuple(curve)


def _constant_bytes(
    stages: Sequence[int], changes: Sequence[tuple[int, int, int]], estimates: Sequence[Estimate]
) -> int:
    """Return what a worker holds besides the micro-batches in flight."""
    found = workspace = 0
    for stage in stages:
        held = most = 0
        for _, own, size in changes:
            held += size if own == stage else 0
            most = max(most, held)
        known = estimates[stage]
        found += known.peak_bytes - most - known.workspace_bytes
        workspace = max(workspace, known.workspace_bytes)
    return found + workspace


def rank_peaks(plan: Plan) -> tuple[int, ...]:
    """Return the most bytes that the plan charges each rank, 0 for a rank that idles or a plan without estimates.

    For a rank with several stages it is the top of its curve, or without a simulated step the sum of their peaks.
    """
    if not plan.estimates:
        return (0,) * plan.decision.world
    tops = {
        plan.decision.stages_of_rank(rank): max(size for _, size in memory_curve(own, plan.decision, plan.estimates))
        for rank, own in read_spans(plan.outlook.spans).by_rank().items()
    }
    found = []
    for rank in range(plan.decision.world):
        stages = plan.decision.stages_of_rank(rank)
        peaks = [plan.estimates[s].peak_bytes for s in stages]
        found.append(tops.get(stages, sum(peaks)) if len(peaks) > 1 else sum(peaks))
    return tuple(found)
