"""A user-defined report: how long each rank of a step is idle."""

from __future__ import annotations

from autopart.ir.timeline import Timeline
from autopart.report.plan_table import table_lines


def idle_table(step: Timeline) -> str:
    """Return a table with the idle milliseconds of each rank and their share of the step."""
    grid = [["rank", "idle ms", "share"]]
    for rank in sorted({span.rank for span in step.spans}):
        idle_ns = step.step_ns - step.busy_ns(rank)
        grid.append([str(rank), f"{idle_ns / 1e6:.2f}", f"{idle_ns / step.step_ns:.0%}"])
    return "\n".join(table_lines(grid, words=[0])) + "\n"
