"""A plan in a notebook: its stages, and a picture if it is small."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.plan import Plan
from autopart.ir.timeline import read_spans
from autopart.report.page import facts
from autopart.report.page.words import Cell
from autopart.report.plan_table import modules_of, summary
from autopart.report.svg_timeline import said, timeline_svg

MOST_STAGES, MOST_SPANS = 16, 300
"""What a notebook shows: more stages are counted, longer steps are left to `Plan.report`."""


def plan_fragment(plan: Plan, *remarks: str) -> str:
    """Return HTML without scripts for the output of a notebook.  remarks: lines below."""
    lines = [summary(plan.decision)]
    if plan.step_ns:
        lines.append(f"simulated step {plan.step_ns / 1e6:.2f} ms, bubble {plan.outlook.bubble:.1%}")
    table = facts.stages(plan, modules_of(plan, None), None)
    rows = [_row("td", [cell.text for cell in row], row) for row in table.rows[:MOST_STAGES]]
    left = len(table.rows) - MOST_STAGES
    if left > 0:
        remarks = (f"and {left} more stages", *remarks)
    head = _row("th", table.heads, table.rows[0])
    step = read_spans(plan.outlook.spans)
    drawn = timeline_svg({"simulated": step}, width=900) if 0 < len(step.spans) <= MOST_SPANS else ""
    return (
        "<div>"
        + "".join(f"<p>{said(line)}</p>" for line in lines)
        + f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p>{said(remark)}</p>" for remark in remarks)
        + f"{drawn}</div>"
    )


def _row(tag: str, texts: Sequence[str], cells: Sequence[Cell]) -> str:
    """Return a row whose numbers stand to the right."""
    sides = ["left" if cell.exact is None else "right" for cell in cells]
    inside = (f'<{tag} style="text-align:{side}">{said(text)}</{tag}>' for text, side in zip(texts, sides, strict=True))
    return f"<tr>{''.join(inside)}</tr>"
