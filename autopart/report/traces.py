"""Write timelines to files: for a trace viewer, as a picture, or as text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopart.ir.actions import BACKWARD, COMPUTE, FORWARD, WEIGHTS, Action
from autopart.ir.errors import WRITABLE, UsageError, short_errors
from autopart.ir.timeline import Span, Timeline
from autopart.report.svg_timeline import timeline_svg


@short_errors
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
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error), fix=WRITABLE) from error


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


# ---- as text -------------------------------------------------------------------------------------------------------

IDLE, ONCE_A_STEP = ".", "+"
FILL = {FORWARD: "-", BACKWARD: "=", WEIGHTS: "~"}
"""Characters after the label of a compute, by its way."""


def timelines_text(timelines: Mapping[str, Timeline], width: int = 100) -> str:
    """Return the pictures of timelines on one scale, each under its name and step; of one, the picture alone."""
    step_ns = max([timeline.step_ns for timeline in timelines.values()], default=0)
    pictures = {name: timeline_text(each, width, step_ns=step_ns) for name, each in timelines.items()}
    if len(pictures) == 1:
        return "".join(pictures.values())
    return "\n".join(f"{name}: {timelines[name].step_ns / 1e6:.2f} ms\n{text}" for name, text in pictures.items())


def timeline_text(timeline: Timeline, width: int = 100, *, step_ns: int = 0) -> str:
    """Return what each rank does besides messages, to scale: time to the right, a line for each rank.

        rank 0 |F0--F1--F2--........B0======B1======B2======|
        rank 1 |....F0--B0======F1--B1======F2--B2======....|

    F: forward and B: backward, with the micro-batch, or I and W: its parts of inputs and of weights; T, R: sums of
    gradients (of tied parameters, over replicas); O: optimizer step; a dot: idle.  On a rank with several stages the
    stage is before the letter: 2F0.  width: characters for the whole step; a span gets at least one.  Where a rank has
    more spans than half of that, each character is what takes most of its time.  step_ns: that fill the width; 0: the
    timeline's own.
    """
    if width < 1:
        raise ValueError(f"width is {width}, must be at least 1")
    step = step_ns or timeline.step_ns or 1
    every = timeline.by_rank()
    own = {rank: [span for span in every[rank] if not span.action.is_a.is_message] for rank in every}
    draw = _labelled if 2 * max(map(len, own.values()), default=0) <= width else _sampled
    digits = len(str(max(own, default=0)))
    return "".join(f"rank {rank:<{digits}} |{draw(spans, width, step)}|\n" for rank, spans in own.items())


def _labelled(spans: Sequence[Span], width: int, step_ns: int) -> str:
    """Return each span with its label and at least a character; a span pushes those behind it."""
    cells = [IDLE] * width
    done = 0
    several = len({span.action.stage for span in spans if span.action.is_a.is_per_slot}) > 1
    for span in spans:
        start = min(max(done, span.start_ns * width // step_ns), width - 1)
        done = min(max(start + 1, span.end_ns * width // step_ns), width)
        cells[start:done] = _label(span.action, several, done - start)
    return "".join(cells)


def _sampled(spans: Sequence[Span], width: int, step_ns: int) -> str:
    """Return in each character the kind of action that takes most of its time, or that nothing does.

    O(spans + width), as spans of a rank do not overlap.
    """
    taken: list[dict[str, int]] = [{} for _ in range(width)]
    for span in spans:
        for cell in range(span.start_ns * width // step_ns, min(width, span.end_ns * width // step_ns + 1)):
            begin, end = cell * step_ns // width, (cell + 1) * step_ns // width
            shared = min(end, span.end_ns) - max(begin, span.start_ns)
            if shared > 0:
                taken[cell][span.action.kind] = taken[cell].get(span.action.kind, 0) + shared
    cells = []
    for cell, kinds in enumerate(taken):
        idle = ((cell + 1) * step_ns // width - cell * step_ns // width) - sum(kinds.values())
        kind = max(kinds, key=lambda name: kinds[name], default=IDLE)
        cells.append(IDLE if kinds.get(kind, 0) < idle else kind)
    return "".join(cells)


def _label(action: Action, several: bool, room: int) -> str:
    """Return the label of an action, cut or filled to `room` characters."""
    fill = FILL[action.is_a.way] if action.is_a.role == COMPUTE else ONCE_A_STEP
    micro = str(action.micro) if action.micro >= 0 else ""
    full = f"{action.stage if several else ''}{action.kind}{micro}"
    label = full if len(full) <= room else action.kind[:room]
    return label.ljust(room, fill)
