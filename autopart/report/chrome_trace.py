"""A timeline in the trace event format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autopart.ir.timeline import Span, Timeline


def chrome_trace(timeline: Timeline, *, name: str = "autopart", labels: Mapping[int, str] | None = None) -> str:
    """JSON in the trace event format, times in microseconds.

    Messages run beside what a rank does itself, so each rank has lane 0 for its own work and as many more as messages
    overlap.  name: of the run, as "simulated"; labels: text per rank, as "stage 1".
    """
    events: list[dict[str, object]] = []
    ranks = sorted({span.rank for span in timeline.spans})
    for rank in ranks:
        label = (labels or {}).get(rank, "")
        title = f"rank {rank}" + (f" ({label})" if label else "")
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": title}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        spans = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: (s.start_ns, s.end_ns))
        lanes = _lanes(spans)
        for lane in sorted(set(lanes)):
            what = "compute" if lane == 0 else f"messages {lane}"
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": what}})
        events += [_event(span, lane) for span, lane in zip(spans, lanes, strict=True)]
    other: dict[str, object] = {"name": name, "step_ns": timeline.step_ns, "peak_bytes": list(timeline.peak_bytes)}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, indent=1) + "\n"


def _lanes(spans: list[Span]) -> list[int]:
    """Lane 0 for what the rank does itself, for a message the first other that is free: messages of a lane never
    overlap."""
    free_at: list[int] = []
    lanes = []
    for span in spans:
        if not span.action.is_a.is_message:
            lanes.append(0)
            continue
        lane = next((i for i, end in enumerate(free_at) if end <= span.start_ns), len(free_at))
        if lane == len(free_at):
            free_at.append(0)
        free_at[lane] = span.end_ns
        lanes.append(lane + 1)
    return lanes


def _event(span: Span, lane: int) -> dict[str, object]:
    action = span.action
    facts: dict[str, object] = {"stage": action.stage}
    if action.is_a.is_per_slot:
        facts |= {"micro": action.micro, "slice": action.slot.slice}
    if action.peer is not None:
        facts["peer"] = action.peer
    return {
        "name": str(action),
        "cat": action.is_a.label,
        "ph": "X",
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "pid": span.rank,
        "tid": lane,
        "args": facts,
    }
