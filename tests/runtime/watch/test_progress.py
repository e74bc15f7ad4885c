"""Lines on the terminal about what rank 0 prepares."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import autopart
from autopart.planning import make
from autopart.runtime import activity
from autopart.runtime.activity import SharedStatus
from autopart.runtime.watch.progress import Progress, is_wanted

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch, autopart
from autopart.runtime.watch import progress
progress.TICK_S, progress.LEAST_S = 0.005, 0.01

def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    sample, loss = (torch.randn(4, 4), torch.randn(4, 1)), torch.nn.MSELoss()
    with autopart.compile(model, "cpu:1", loss_fn=loss, sample=sample, cache=False) as p:
        p.step(sample)
        p.step((torch.randn(4, 3, 4), torch.randn(4, 3, 1)))

train()
"""


@pytest.fixture(autouse=True)
def own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_status", SharedStatus())
    monkeypatch.delenv("AUTOPART_PROGRESS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize("live", [True, False])
def test_a_phase_that_lasts_gets_one_line(live: bool) -> None:
    progress = Progress(live=live)
    written = [progress.look(0.0)]
    with activity.patient("planning"):
        written.append(progress.look(1.0))
        with activity.patient("capturing the model"):
            written += [progress.look(1.1 + second) for second in range(4)]
        written.append(progress.look(5.0))
    activity.set_activity("1F0: forward of micro-batch 0")
    written += [progress.look(6.0), progress.look(60.0)]
    lines = [text for text in written if text]
    last = "autopart: capturing the model took 3.9 s\n"
    if live:
        counted = [f"\r\x1b[Kautopart: capturing the model ... {second} s" for second in (1, 2, 3)]
        assert lines == [*counted, f"\r\x1b[K{last}"]
    else:
        assert lines == [last]


def test_short_phases_and_steps_are_silent() -> None:
    progress, now = Progress(live=True), 0.0
    for _ in range(50):  # each step looks whether there is a capture
        with activity.patient("capturing the model"):
            assert not progress.look(now := now + 0.1)
        activity.set_activity("1F0: forward of micro-batch 0")
        assert not progress.look(now := now + 10.0)


def test_only_rank_0_is_wanted_on_a_terminal_or_by_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_wanted()  # stderr is no terminal under pytest
    for stated, rank, wanted in (("1", "0", True), ("1", "1", False), ("0", "0", False)):
        monkeypatch.setenv("AUTOPART_PROGRESS", stated)
        monkeypatch.setenv("RANK", rank)
        assert is_wanted() is wanted


def test_planning_notes_each_of_its_phases() -> None:
    model, sample = torch.nn.Linear(4, 1), (torch.randn(4, 4), torch.randn(4, 1))
    with mock.patch.object(make, "patient", side_effect=activity.patient) as noted:
        autopart.plan(model, "cpu:1", loss_fn=torch.nn.MSELoss(), sample=sample, costs="analytic", cache=False)
    said = list(dict.fromkeys(call.args[0] for call in noted.call_args_list))
    assert said == ["capturing the model", "taking the costs of its ops", "searching a plan"]


def test_compile_and_a_new_capture_are_shown_on_a_terminal(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOPART_CACHE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stderr=child, stdout=subprocess.PIPE) as process:
        os.close(child)
        shown = _read(parent)
        assert process.wait() == 0, shown
    said = re.findall(r"autopart: ([a-z ]+) took \d+\.\d s", shown)
    assert said.count("capturing the model") >= 2, shown
    assert "\r\x1b[Kautopart: " in shown, shown
    ready = r"autopart: captured in \d+\.\d s, planned in \d+\.\d s: schedule .*; predicted step \d+\.\d ms"
    assert len(re.findall(ready, shown)) == 1, shown


@pytest.mark.slow
@pytest.mark.parametrize(("stated", "lines"), [("", False), ("1", True)])
def test_where_stderr_is_no_terminal_nothing_is_shown_unless_asked(tmp_path: Path, stated: str, lines: bool) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "AUTOPART_CACHE": str(tmp_path), "AUTOPART_PROGRESS": stated}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    assert ("autopart: capturing the model took" in found.stderr) is lines
    assert "\r" not in found.stderr and not found.stdout


def _read(terminal: int) -> str:
    """Return all that is written to a terminal until nobody has it open."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)
