"""Render a plan as one HTML page, or for a notebook as a table with a picture if it is small."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup

from autopart.ir.errors import UsageError, printable
from autopart.ir.plan import Plan
from autopart.ir.timeline import MOST_SPANS, Timeline, read_spans
from autopart.report.comparison import Answer
from autopart.report.critical_path import critical_path
from autopart.report.page import facts
from autopart.report.page.facts import duration_text
from autopart.report.page.rows import MEASURED, SIMULATED, Json, picture
from autopart.report.plan_table import modules_of, summary
from autopart.report.svg_timeline import timeline_svg
from autopart.report.traces import write_drawing

MOST_DRAWN = 800
"""Spans up to which the page also holds a drawing that needs no script."""
NOTEBOOK_STAGES, NOTEBOOK_SPANS = 16, 300
"""What a notebook shows: more stages are counted, longer steps are left to `Plan.report`."""
_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
"""Characters of JSON that could end a script element, or a line of a script."""
NO_SPANS = f"The plan does not hold its simulated step: it has more than {MOST_SPANS:,} actions, or was made by hand."


def write_page(plan: Plan, path: str | os.PathLike[str], *, title: str = "", **shown: Any) -> Path:
    """Write the page of a plan with what this process knows of itself, and return its path.  shown: as for `plan_page`.

    Raises UsageError if the path does not end in .html, or cannot be written.
    """
    target = Path(path)
    if target.suffix not in (".html", ".htm"):
        raise UsageError(f"a report is a page, and {target} does not end in .html", fix="let the name end in .html")
    text = plan_page(plan, title=title or f"autopart: {target.stem}", about=facts.drawn_here(), **shown)
    write_drawing(target, text)
    return target


def plan_page(
    plan: Plan,
    *,
    answer: Answer | None = None,
    options: Mapping[str, object] = MappingProxyType({}),
    measured: Timeline | None = None,
    peaks: Mapping[int, int] | None = None,
    of_process: bool = False,
    title: str = "autopart",
    about: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return one HTML page that needs no network: tables, and a picture of the step.

    answer: machines, batch and graph of the plan, where they are known.  options: that were asked for.  measured: a
    step that ran.  peaks: measured bytes of each rank; of_process: whether of whole processes.  about: when, where and
    with what the page is drawn.  Raises UsageError for a step of another plan.
    """
    simulated = read_spans(plan.outlook.spans)
    panels = {SIMULATED: simulated} if simulated.spans else {}
    if measured is not None and measured.spans:
        panels[MEASURED] = _of_plan(measured, plan)
    path = critical_path(simulated)
    drawn: Json | None = picture(panels, plan, path) if panels else None
    small = panels and sum(len(each.spans) for each in panels.values()) <= MOST_DRAWN
    limits, limited = facts.limits(path, plan.step_ns)
    held = "simulated, at its fullest moment" + ("; a process holds Python and libraries besides" if of_process else "")
    modules = modules_of(plan, answer.graph if answer is not None else None)
    memories = facts.memories(plan, peaks or {}, of_process=of_process)
    sections = [
        ("What limits the step", limited, limits),
        ("Stages", "times of one micro-batch on one device", facts.stages(plan, modules, measured)),
        ("Predicted and measured", "means over micro-batches and replicas", facts.compared(plan, measured)),
        ("Memory of a device", held, memories),
        ("Alternatives", "plans that were not taken", facts.alternatives(plan)),
    ]
    script = _asset("picture.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown = " and the ".join(f"{name} step of {duration_text(each.step_ns)}" for name, each in panels.items())
    known = {**(facts.asked(answer, options) if answer is not None else {}), **about}
    return _template("page.html.j2").render(
        title=printable(title),
        subtitle=printable(summary(plan.decision)),
        tiles=facts.tiles(plan, measured, answer),
        picture=drawn,
        has_memory=bool(simulated.spans and plan.estimates),
        picture_label=f"Timeline of the {shown}: a row for each rank, with its computes, messages and bubbles",
        fallback=Markup(timeline_svg(panels)) if small else "",
        no_picture=NO_SPANS if plan.step_ns else "Nothing of this plan was simulated.",
        sections=[section for section in sections if section[2] is not None],
        about=[*((name, printable(text)) for name, text in known.items()), *facts.provenance(plan)],
        notes=[printable(note) for note in plan.notes],
        data=Markup(json.dumps({"picture": drawn}, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)),
        script=Markup(script),
        script_hash=Markup(f"sha256-{digest}"),
        style=Markup(_asset("style.css")),
    )


def _of_plan(measured: Timeline, plan: Plan) -> Timeline:
    """Return a step that ran under this plan.  Raises UsageError if it ran under another one."""
    micros = len(plan.micro_rows)
    for span in measured.spans:
        action = span.action
        runs = action.stage in plan.decision.stages_of_rank(span.rank) or not action.is_a.is_per_slot
        if not runs or action.micro >= micros or action.slot.slice >= plan.decision.slices:
            raise UsageError(
                "the measured step does not belong to this plan",
                why=f"rank {span.rank} ran {action} in it, which the plan does not contain",
                fix="pass the plan that was running: autopart.save_plan(pipe.plan, ...)",
            )
    return measured


def plan_fragment(plan: Plan, *remarks: str) -> str:
    """Return HTML without scripts for the output of a notebook.  remarks: lines below."""
    lines = [summary(plan.decision)]
    if plan.step_ns:
        lines.append(f"simulated step {plan.step_ns / 1e6:.2f} ms, bubble {plan.outlook.bubble:.1%}")
    table = facts.stages(plan, modules_of(plan, None), None)
    left = len(table.rows) - NOTEBOOK_STAGES
    if left > 0:
        remarks = (f"and {left} more stages", *remarks)
    step = read_spans(plan.outlook.spans)
    small = 0 < len(step.spans) <= NOTEBOOK_SPANS
    return _template("notebook.html.j2").render(
        lines=map(printable, lines),
        rows=table.rows[:NOTEBOOK_STAGES],
        remarks=map(printable, remarks),
        drawing=Markup(timeline_svg({"simulated": step}, width=900)) if small else "",
    )


@lru_cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset(name))


def _asset(name: str) -> str:
    """Return a file that stands beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
