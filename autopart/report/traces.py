"""Write timelines to files: for a trace viewer, or as text."""

from __future__ import annotations

import os
from pathlib import Path

from autopart.ir.errors import UsageError
from autopart.ir.timeline import Timeline
from autopart.report.chrome_trace import chrome_trace
from autopart.report.text_timeline import timeline_text


def save_trace(timeline: Timeline, path: str | os.PathLike[str], *, name: str = "autopart") -> None:
    """Write a simulated or measured timeline.

    path: ends in .json for the trace event format, which chrome://tracing and ui.perfetto.dev open, or in .txt for a
    picture in text.  name: of the run, in the JSON.  Raises UsageError for another ending, or if it cannot write.
    """
    target = Path(path)
    if target.suffix not in (".json", ".txt"):
        raise UsageError(
            f"{target} ends neither in .json nor in .txt", fix="let it end in .json (Chrome trace) or .txt"
        )
    text = chrome_trace(timeline, name=name) if target.suffix == ".json" else timeline_text(timeline)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error
