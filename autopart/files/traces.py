"""Read a timeline that `save_trace` wrote as a Chrome trace."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from autopart.files.documents import parse_json
from autopart.files.limits import MAX_INTEGER, MAX_RANKS
from autopart.files.reading import named, read_text, unreadable, validated
from autopart.ir.actions import parse_action
from autopart.ir.errors import ProgramError, UsageError
from autopart.ir.timeline import Span, Timeline

Microseconds = Annotated[float, Field(ge=0, le=MAX_INTEGER / 1000)]
_FIX = 'write it with autopart.save_trace(pipe.timeline(batch), "measured.json")'


class _Event(BaseModel):
    """A span of the trace event format; times are microseconds, pid is the rank."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    name: str
    pid: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ts: Microseconds
    dur: Microseconds


_EVENTS = TypeAdapter(list[_Event])


def load_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from a file in the trace event format, with times in nanoseconds.

    Raises UsageError for a file of another format, or with an unknown action.
    """
    with named(path, UsageError, _FIX):
        document = parse_json(read_text(path))
        events = document.get("traceEvents") if isinstance(document, dict) else None
        if not isinstance(events, list):
            raise unreadable("is not a trace", where="traceEvents", why="the list of events is missing")
        timed = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
        found = validated("is not a valid trace", _EVENTS.validate_python, timed)
        starts = [round(event.ts * 1000) for event in found]
        try:
            spans = [
                Span(event.pid, parse_action(event.name), start, start + round(event.dur * 1000))
                for event, start in zip(found, starts, strict=True)
            ]
        except ProgramError as error:
            raise unreadable("is not a trace of autopart", why=error.what) from error
        if not spans:
            raise unreadable("has no events that take time")
        return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))))
