"""Timelines as files: for a trace viewer, or as a picture in text."""

from __future__ import annotations

import os
from pathlib import Path

from autopart.ir.errors import UsageError
from autopart.ir.timeline import Timeline
from autopart.report.chrome_trace import chrome_trace
from autopart.report.text_timeline import timeline_text


def save_trace(timeline: Timeline, path: str | os.PathLike[str], *, name: str = "autopart") -> None:
    """Write a timeline, simulated or measured.

    path: ends in .json for the trace event format, which chrome://tracing and ui.perfetto.dev open, or in .txt for a
    picture in text.  name: of the run, noted in the JSON.  Raises UsageError for another ending or a path that cannot
    be written.
    """
    target = Path(path)
    if target.suffix not in (".json", ".txt"):
        raise UsageError(f"{target} does not say what to write", fix="let it end in .json (Chrome trace) or .txt")
    text = chrome_trace(timeline, name=name) if target.suffix == ".json" else timeline_text(timeline)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error
