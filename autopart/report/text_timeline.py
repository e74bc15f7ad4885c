"""A timeline as a picture in text: time to the right, a line per rank.

rank 0 |F0--F1--F2--........B0======B1======B2======|
rank 1 |....F0--B0======F1--B1======F2--B2======....|
"""

from __future__ import annotations

from autopart.ir.timeline import Timeline

IDLE, FILL = ".", {"F": "-", "B": "=", "T": "+"}


def schedule_text(timeline: Timeline, width: int = 100) -> str:
    """Forwards (F), backwards (B) and sums over tied parameters (T) of each rank, to scale; a dot is an idle moment.

    width: characters for the whole step.  A span gets at least one character, at the cost of what follows it.
    """
    if width < 1:
        raise ValueError(f"width is {width}, must be at least 1")
    step = timeline.step_ns or 1
    lines = []
    for rank in sorted({span.rank for span in timeline.spans}):
        cells = [IDLE] * width
        done = 0
        for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: (s.start_ns, s.end_ns)):
            kind = span.action.kind
            if kind not in FILL:
                continue
            start = min(max(done, span.start_ns * width // step), width - 1)
            done = min(max(start + 1, span.end_ns * width // step), width)
            label = kind if kind == "T" else f"{kind}{span.action.micro}"
            label = label if len(label) <= done - start else kind  # no room for the number
            cells[start:done] = label.ljust(done - start, FILL[kind])
        lines.append(f"rank {rank} |{''.join(cells)}|")
    return "\n".join(lines) + "\n" if lines else ""
