"""Errors raised on purpose that end a script are printed once, with the user's lines alone, also under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopart.ir.errors import HOME, BatchError, StageError, UsageError, WorkerError, printed

SCRIPT = """
import sys
import torch
from torch import nn
import autopart

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
sample = torch.randn(8, 8), torch.randn(8, 1)
options = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "stages": 2}
if sys.argv[1] == "plan":
    autopart.compile(model, "cpu:2", sample=sample, **(options | {"stages": 9}))
pipe = autopart.compile(model, "cpu:2", sample=sample, **options)
rows = 3 if pipe.rank == 1 else 8
pipe.step((torch.randn(rows, 8), sample[1]))
"""


def raised(error: Exception) -> tuple[Exception, object]:
    try:
        raise error
    except Exception as caught:
        return caught, caught.__traceback__


@pytest.mark.parametrize(
    ("rank", "error", "everywhere", "lines"),
    [
        ("0", UsageError("wrong", fix="right"), False, "whole"),
        ("0", BatchError("wrong"), True, "whole"),
        ("2", BatchError("wrong"), True, "nothing"),
        ("2", BatchError("wrong"), False, "a line"),
        ("2", WorkerError("rank 1 has ended"), False, "a line"),
        ("2", StageError("an op failed"), False, "whole"),
        ("2", StageError("an op failed"), True, "nothing"),
    ],
    ids=str,
)
def test_a_rank_prints_what_no_other_prints(
    rank: str, error: UsageError, everywhere: bool, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    error.everywhere = everywhere
    text = printed(error, raised(error)[1])  # type: ignore[arg-type]
    assert {"nothing": text == "", "a line": text.count("\n") == 1, "whole": "Traceback" in text}[lines], text
    assert error.what in text or lines == "nothing"


def test_a_cause_in_the_code_of_the_user_is_printed_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    error = StageError("an op failed")
    error.__cause__ = raised(ValueError("in my op"))[0]
    text = printed(error, None)
    assert text.index(Path(__file__).name) < text.index("ValueError: in my op") < text.index("an op failed")
    error.__cause__ = raised(BatchError("told by another rank"))[0]
    assert printed(error, None) == "autopart.ir.errors.StageError: an op failed\n  see: docs/errors.md#stageerror\n"


def test_a_hook_of_the_user_stays() -> None:
    code = (
        "import sys, autopart\n"
        "sys.excepthook = lambda kind, error, trace: print('mine', kind.__name__)\n"
        "autopart.launch(3, 'cpu:2')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert found.stdout == "mine UsageError\n" and found.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "says"), [("plan", "9 stages need 9 devices"), ("batch", "have 3 and 8 rows")])
def test_torchrun_prints_an_error_once_without_our_frames(what: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run([*command, str(script), what], capture_output=True, text=True, timeout=200)
    assert found.returncode != 0 and found.stderr.count(says) == 1
    ours = found.stderr[: found.stderr.index(says)]
    assert "Traceback" in ours and HOME not in ours and str(script) in ours
