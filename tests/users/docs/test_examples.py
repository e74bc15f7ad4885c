"""The examples train, and the demo agrees with one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo import Batches, Outcome, Run, Setting, in_one_process, library_bytes, over_ranks, report

from autopart.pipe.compare import Difference, Verification

DEMO = Path(__file__).parents[3] / "examples/demo.py"
GOOD = Difference("layer.weight", "gradient", 0, 2.0, 1e-8, False, True)
BAD = Difference("layer.bias", "gradient", 1, 1.0, 0.5, False, False)
TINY = Setting(stages=1, steps=4, compared=3, every=2, layers=1, width=16, rows=8, seq=16)


@pytest.mark.slow
def test_the_demo_in_one_stage_equals_one_process(capsys):
    pipeline, alone = over_ranks(TINY), in_one_process(TINY)
    outcome = Outcome(pipeline, alone)
    assert len(pipeline.losses) == 4 and len(alone.losses) == 3
    assert outcome.drift < 1e-5 and outcome.agree
    assert outcome.ok and not outcome.judges_loss  # four steps cannot bring the loss below the limit
    printed = capsys.readouterr().out
    assert "step    1   loss 5." in printed and "step    4   loss 5." in printed and "tokens/s" in printed
    text = report(outcome)
    assert text.endswith("OK") and "the mean of the last 4 steps (only judged after 200 steps)" in text


def test_the_demo_continues_training_after_its_check(pair):
    """Closing the pipe of the check must not affect the pipe that trains."""
    first, second = pair.run(over_ranks, replace(TINY, stages=2))
    assert first.losses == second.losses and len(first.losses) == 4
    assert first.first_step.ok


def test_the_demo_passes_when_runs_agree_and_the_loss_fell():
    check = Verification(5.0, 5.0, 1e-5, "one", (GOOD,), ())
    run = Run((5.0, *[2.5] * 199), 1.0, check)
    assert Outcome(run, Run((5.0, 2.5), 1.0)).ok
    assert not Outcome(run, Run((5.0, 2.6), 1.0)).ok
    assert not Outcome(replace(run, first_step=replace(check, gradients=(BAD,))), Run((5.0,), 1.0)).ok
    high = Outcome(replace(run, losses=(5.0, *[3.1] * 199)), Run((5.0,), 1.0))
    assert not high.ok and report(high).endswith("FAILED: the loss did not fall")
    assert not Outcome(replace(run, losses=(5.0, float("nan"))), Run((5.0, 2.5), 1.0)).ok


def test_batches_are_the_same_in_every_instance():
    text = library_bytes(200_000)
    assert len(text) == 200_000 and int(text.max()) < 256
    first, again = Batches(text, 4, 16), Batches(text, 4, 16)
    assert torch.equal(first[7]["input_ids"], again[7]["input_ids"])
    assert not torch.equal(first[7]["input_ids"], first[8]["input_ids"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_ends_with_ok():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run([sys.executable, DEMO], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("OK")
