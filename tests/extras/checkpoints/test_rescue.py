"""What ranks that live keep in memory, and when it is the state of a step (in one process; losses of real ranks are in
e2e/failures/test_elastic.py)."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.failures import rescue_jobs
from support.jobs.state import checkpoint_jobs as jobs
from support.workers import Workers

import autopart
from autopart.ir.errors import WorkerError
from autopart.session.ranks.call_sync import STEP_FAILED

LOST = WorkerError("rank 1 ended: its process 1 is gone")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPART_RESCUE", str(tmp_path / "memory"))
    return tmp_path / "memory"


def trained(folder: Path, steps: int = 2) -> tuple[autopart.Pipe, Any, Any]:
    """Return a pipe that was loaded from a folder, and has made some steps."""
    pipe = autopart.compile(jobs.model(1, torch.float64), "cpu:1", sample=jobs.batch(0))
    optimizer, scheduler = jobs.trainer(pipe)
    pipe.load(folder, optimizer, scheduler, missing_ok=True)
    jobs.train(pipe, optimizer, scheduler, range(pipe.steps, pipe.steps + steps))
    optimizer.zero_grad()
    return pipe, optimizer, scheduler


def lose_a_rank(pipe: autopart.Pipe, doing: str = STEP_FAILED) -> None:
    """Let a pipe learn in a call that another rank is gone."""
    for each in pipe.session.calls.listeners:
        each.failed(doing, LOST)


def test_a_run_goes_on_from_memory_after_the_last_step_of_the_ranks_that_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, optimizer, scheduler = trained(tmp_path / "run")
    pipe.save(tmp_path / "run", optimizer, scheduler)
    jobs.train(pipe, optimizer, scheduler, range(2, 4))
    optimizer.zero_grad()
    lose_a_rank(pipe)
    expected = jobs.train(pipe, optimizer, scheduler, range(4, 6))
    pipe.close()
    with caplog.at_level(logging.WARNING, "autopart"):
        again, optimizer, scheduler = trained(tmp_path / "run", 0)
    assert again.steps == 4 and "from memory after step 4; the last checkpoint is of step 2" in caplog.text
    assert jobs.train(again, optimizer, scheduler, range(4, 6)) == expected
    again.save(tmp_path / "run", optimizer, scheduler)
    again.close()
    assert not list(tmp_path.glob("memory/*/step-*"))  # the checkpoint is further


def _accumulate(pipe: autopart.Pipe, optimizer: Any, scheduler: Any, folder: Path) -> None:
    pipe.step(jobs.batch(2))


def _save_extra(pipe: autopart.Pipe, optimizer: Any, scheduler: Any, folder: Path) -> None:
    pipe.save(folder, optimizer, scheduler, {"best": 1.0})


def _save_without_optimizer(pipe: autopart.Pipe, optimizer: Any, scheduler: Any, folder: Path) -> None:
    pipe.save(folder)


def _schedule_before_the_step(pipe: autopart.Pipe, optimizer: Any, scheduler: Any, folder: Path) -> None:
    pipe.save(folder, optimizer, scheduler)
    scheduler.step()
    pipe.step(jobs.batch(2))
    optimizer.step()
    optimizer.zero_grad()


def _use_another_optimizer(pipe: autopart.Pipe, optimizer: Any, scheduler: Any, folder: Path) -> None:
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("change", "doing", "why"),
    [
        (_use_another_optimizer, STEP_FAILED, "an optimizer that was not passed to load or save"),
        (_accumulate, STEP_FAILED, "gradients of earlier steps wait for the optimizer"),
        (_save_extra, STEP_FAILED, "extra= of the last save"),
        (_save_without_optimizer, STEP_FAILED, "no optimizer was passed"),
        (_schedule_before_the_step, STEP_FAILED, "the script changes the scheduler"),
        (lambda *_: None, "clip_grad_norm_", "in a call between two steps (clip_grad_norm_)"),
    ],
)
def test_a_state_that_is_not_that_of_a_step_is_not_kept_and_the_reason_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[..., None], doing: str, why: str
) -> None:
    pipe, optimizer, scheduler = trained(tmp_path / "run")
    pipe.save(tmp_path / "run", optimizer, scheduler)
    change(pipe, optimizer, scheduler, tmp_path / "run")
    lose_a_rank(pipe, doing)
    pipe.close()
    with caplog.at_level(logging.WARNING, "autopart"), autopart.compile(jobs.model(1, torch.float64), "cpu:1") as again:
        again.step(jobs.batch(0))
        again.load(tmp_path / "run")
        assert again.steps == 2
    assert why in caplog.text and "cannot continue from memory" in caplog.text


def test_two_pipes_of_one_script_are_not_continued_at_different_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, *_ = trained(tmp_path / "a")
    second, *_ = trained(tmp_path / "b")
    lose_a_rank(first)
    for pipe in (first, second):
        pipe.close()
    with caplog.at_level(logging.WARNING, "autopart"):
        again, _, _ = trained(tmp_path / "a", 0)
        again.close()
    assert again.steps == 0 and "trains several pipes" in caplog.text


def test_a_changed_file_in_memory_is_named_and_the_checkpoint_is_loaded(tmp_path: Path, memory: Path) -> None:
    pipe, optimizer, scheduler = trained(tmp_path / "run")
    pipe.save(tmp_path / "run", optimizer, scheduler)
    jobs.train(pipe, optimizer, scheduler, range(2, 3))
    optimizer.zero_grad()
    lose_a_rank(pipe)
    pipe.close()
    (kept,) = memory.glob("*/start-*/rank-*/checkpoint.json")
    kept.write_text(kept.read_text().replace('"step": 3', '"step": 9'))
    again, *_ = trained(tmp_path / "run", 0)
    again.close()
    assert again.steps == 2


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_whatever_is_damaged_in_memory_the_run_goes_on_from_there_or_from_the_checkpoint(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    pipe, optimizer, scheduler = trained(tmp_path / "run")
    pipe.save(tmp_path / "run", optimizer, scheduler)
    jobs.train(pipe, optimizer, scheduler, range(2, 3))
    optimizer.zero_grad()
    lose_a_rank(pipe)
    pipe.close()
    shutil.copytree(memory, tmp_path / "whole")
    again, optimizer, scheduler = trained(tmp_path / "none", 0)
    steps = []
    for seed in range(count):
        shutil.rmtree(memory)
        shutil.copytree(tmp_path / "whole", memory)
        draw = random.Random(seed)
        path = draw.choice(sorted(memory.glob("*/start-*/rank-*/*")))
        raw, place = path.read_bytes(), draw.randrange(path.stat().st_size)
        how = draw.choice(("flip", "flip", "cut", "gone", "pipe"))
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        elif how != "gone":
            path.write_bytes(raw[:place] + (bytes([raw[place] ^ 4]) + raw[place + 1 :] if how == "flip" else b""))
        with caplog.at_level(logging.WARNING, "autopart"):
            caplog.clear()
            again.load(tmp_path / "run", optimizer, scheduler)
        steps.append(again.steps)
        assert (again.steps, "cannot continue from memory" in caplog.text) in ((2, True), (3, False)), (path, how)
    again.close()
    assert steps.count(2) > count // 2


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_replica_that_lives_has_all(pair: Workers, tmp_path: Path, memory: Path, lost: int) -> None:
    options = {"stages": 1, "replicas": 2}
    expected = pair.run(rescue_jobs.kept, str(tmp_path / "run"), str(memory), options)
    forget(memory, lost)
    for steps, losses in pair.run(rescue_jobs.resumed, str(tmp_path / "run"), str(memory), {"cuts": ["6"]}):
        assert steps == 3
        assert losses == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"cuts": ["6"]}, 1),
        pytest.param({"cuts": ["6"]}, 0, marks=pytest.mark.slow),
        pytest.param({"stages": 1, "replicas": 2, "zero": 1}, 0, marks=pytest.mark.slow),
    ],
)
def test_what_only_the_lost_rank_had_or_ranks_have_of_different_steps_is_never_mixed(
    pair: Workers, tmp_path: Path, memory: Path, options: dict[str, Any], ahead: int
) -> None:
    pair.run(rescue_jobs.kept, str(tmp_path / "run"), str(memory), options, ahead)
    if not ahead:
        forget(memory, 1)
    for steps, _ in pair.run(rescue_jobs.resumed, str(tmp_path / "run"), str(memory), {"cuts": ["6"]}):
        assert steps == 1  # of the checkpoint


def forget(memory: Path, rank: int) -> None:
    """Delete what a rank has kept, as if it had died first."""
    for folder in memory.glob(f"*/start-*/rank-{rank:05d}"):
        shutil.rmtree(folder)
