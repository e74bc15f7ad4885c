"""What each worker holds over a simulated step, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.actions import HOLDING
from autopart.ir.plan import Decision, Estimate, Plan
from autopart.ir.timeline import Span, read_spans

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
