"""Traces are read as they were written, and refused by name if they are something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopart.files.traces import load_trace
from autopart.ir.actions import parse_action
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Span, Timeline
from autopart.report.traces import save_trace

STEP = Timeline(
    tuple(Span(i % 2, parse_action(text), 7 * i, 7 * i + 1_000_003) for i, text in enumerate(["0F0", "1F0", "0SF0>1"]))
)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_trace(STEP, tmp_path / "step.json")
    assert load_trace(tmp_path / "step.json") == STEP


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"name": "9Q1"}, "'9Q1' is not an action"),
        ({"ts": -1}, "traceEvents"),
        ({"ts": 1e400}, "finite"),
        ({"pid": 1 << 40}, "traceEvents"),
        ({"dur": "long"}, "traceEvents"),
        ({"ph": "M"}, "no events that take time"),
    ],
    ids=str,
)
def test_wrong_events_are_refused_by_name(event: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    good = {"name": "0F0", "ph": "X", "ts": 1, "dur": 2, "pid": 0}
    path.write_text(json.dumps({"traceEvents": [good | event]}))
    with pytest.raises(UsageError, match=r"step\.json") as caught:
        load_trace(path)
    assert says.removeprefix("traceEvents") in str(caught.value) and "save_trace" in str(caught.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"traceEvents": 3}', "{"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UsageError, match=r"x\.json"):
            load_trace(tmp_path / "x.json")
