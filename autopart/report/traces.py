"""Write timelines to files: for a trace viewer, as a picture, or as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from autopart.ir.errors import UsageError
from autopart.ir.timeline import Timeline
from autopart.report.chrome_trace import chrome_trace
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
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error
