"""Write timelines to files: for a trace viewer, as a picture, or as text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from autopart.ir.errors import UsageError
from autopart.ir.timeline import Span, Timeline
from autopart.report.svg_timeline import timeline_svg
from autopart.report.text_timeline import timelines_text


def save_trace(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    name: str = "autopart",
    beside: Mapping[str, Timeline] | None = None,
) -> None:
    """Write a simulated or measured timeline.

    path: ends in .json for the trace event format, which chrome://tracing and ui.perfetto.dev open, in .svg for a
    picture, or in .txt for a picture in text.  name: of the run.  beside: other timelines by name, drawn below on the
    same scale: `beside={"simulated": step}`; not in .json.  Raises UsageError for another ending, or if it cannot
    write.
    """
    target, others = Path(path), dict(beside or {})
    if target.suffix not in (".json", ".svg", ".txt"):
        fix = "let it end in .json (Chrome trace), .svg or .txt"
        raise UsageError(f"{target} ends neither in .json nor in .svg or .txt", fix=fix)
    if others and target.suffix == ".json":
        raise UsageError(
            "a trace in JSON holds one timeline", fix="write each to a file of its own, or both to one .svg"
        )
    if name in others:
        raise UsageError(f"two timelines are called {name!r}", fix="give each another name (name=, beside=)")
    if target.suffix == ".json":
        text = chrome_trace(timeline, name=name)
    elif target.suffix == ".svg":
        text = timeline_svg({name: timeline, **others})
    else:
        text = timelines_text({name: timeline, **others})
    write_drawing(target, text)


def write_drawing(target: Path, text: str) -> None:
    """Write a file.  Raises UsageError if it cannot be written."""
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error


def chrome_trace(timeline: Timeline, *, name: str = "autopart") -> str:
    """Return JSON in the trace event format, times in microseconds.

    Each rank has lane 0 for its own work, and as many lanes for messages as overlap.  name: of the run, as "simulated".
    """
    events: list[dict[str, object]] = []
    for rank, spans in timeline.by_rank().items():
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        lanes = _lanes(spans)
        for lane in sorted(set(lanes)):
            what = "compute" if lane == 0 else f"messages {lane}"
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": lane, "args": {"name": what}})
        events += [_event(span, lane) for span, lane in zip(spans, lanes, strict=True)]
    other: dict[str, object] = {"name": name, "step_ns": timeline.step_ns, "peak_bytes": list(timeline.peak_bytes)}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, indent=1) + "\n"


def _lanes(spans: list[Span]) -> list[int]:
    """Return the lane of each span: 0 for the rank's own work, for a message the first other lane that is free."""
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
        "dur": span.ns / 1000,
        "pid": span.rank,
        "tid": lane,
        "args": facts,
    }
