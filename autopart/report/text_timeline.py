"""Draw a timeline as text: time to the right, a line per rank.

rank 0 |F0--F1--F2--........B0======B1======B2======|
rank 1 |....F0--B0======F1--B1======F2--B2======....|
"""

from __future__ import annotations

from autopart.ir.actions import BACKWARD, COMPUTE, FORWARD, Action
from autopart.ir.timeline import Timeline

IDLE, ONCE_A_STEP = ".", "+"
FILL = {FORWARD: "-", BACKWARD: "="}
"""Characters after the label of a compute, by its way."""


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """Return what each rank does besides messages, to scale.

    F: forward and B: backward, with the micro-batch; T, R: sums of gradients (of tied parameters, over replicas); O:
    optimizer step; a dot: idle.  On a rank with several stages the stage is before the letter: 2F0.  width: characters
    for the whole step; a span gets at least one.
    """
    if width < 1:
        raise ValueError(f"width is {width}, must be at least 1")
    step = timeline.step_ns or 1
    lines = []
    for rank in sorted({span.rank for span in timeline.spans}):
        cells = [IDLE] * width
        done = 0
        own = [span for span in timeline.spans if span.rank == rank and not span.action.is_a.is_message]
        several = len({span.action.stage for span in own if span.action.is_a.is_per_slot}) > 1
        for span in sorted(own, key=lambda s: (s.start_ns, s.end_ns)):
            start = min(max(done, span.start_ns * width // step), width - 1)
            done = min(max(start + 1, span.end_ns * width // step), width)
            cells[start:done] = _label(span.action, several, done - start)
        lines.append(f"rank {rank} |{''.join(cells)}|")
    return "\n".join(lines) + "\n" if lines else ""


def _label(action: Action, several: bool, room: int) -> str:
    """Return the label of an action, cut or filled to `room` characters."""
    fill = FILL[action.is_a.way] if action.is_a.role == COMPUTE else ONCE_A_STEP
    micro = str(action.micro) if action.micro >= 0 else ""
    full = f"{action.stage if several else ''}{action.kind}{micro}"
    label = full if len(full) <= room else action.kind[:room]
    return label.ljust(room, fill)
