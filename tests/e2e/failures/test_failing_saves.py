"""A save of a pipe that fails on one rank: all ranks raise it, the last checkpoint stays, training goes on."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.state import checkpoint_jobs
from support.jobs.state import checkpoint_jobs as jobs
from support.workers import Workers

import autopart
from autopart.extras.checkpoints import part
from autopart.extras.checkpoints.part import Checkpoints
from autopart.ir.errors import AutopartError

PLAN: dict[str, Any] = {"stages": 2, "micro_batches": 2}


@contextmanager
def full_disk(full: bool) -> Iterator[None]:
    """Let no file grow beyond 256 bytes, as on a disk that has no more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_a_full_disk(folder: str, bad: int, wait: bool) -> tuple[str, str, list[float], list[float], int, list[str]]:
    """Save, save again while the disk of a rank is full, and go on.

    Returns the error's message, the newest checkpoint right after it, the losses of an undisturbed run and of this one,
    the step that is loaded at the end, and what lies in the folder."""
    with autopart.compile(jobs.model(1), "cpu:2", sample=jobs.batch(0), **PLAN) as pipe:
        optimizer, scheduler = jobs.trainer(pipe)
        expected = jobs.train(pipe, optimizer, scheduler, range(5))
    message = ""
    with autopart.compile(jobs.model(1), "cpu:2", sample=jobs.batch(0), **PLAN) as pipe:
        optimizer, scheduler = jobs.trainer(pipe)
        losses = jobs.train(pipe, optimizer, scheduler, range(2))
        pipe.save(folder, optimizer, scheduler)
        losses += jobs.train(pipe, optimizer, scheduler, range(2, 3))
        try:
            with full_disk(pipe.rank == bad):
                pipe.save(folder, optimizer, scheduler, wait=wait)
                if pipe.rank == bad:
                    _end_of_background(pipe)
            jobs.train(pipe, optimizer, scheduler, range(3, 4))
        except AutopartError as error:
            message = f"{type(error).__name__}: {error}"
        newest = str(autopart.latest(folder))
        losses += jobs.train(pipe, optimizer, scheduler, range(3, 5))
        pipe.save(folder, optimizer, scheduler, wait=wait)
    plain = jobs.model(2)
    autopart.load_into(plain, folder)
    with autopart.compile(jobs.model(3), "cpu:2", sample=jobs.batch(0), **PLAN) as pipe:
        pipe.load(folder)
        loaded = pipe.steps
        state = pipe.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    return message, newest, expected, losses, loaded, sorted(path.name for path in Path(folder).iterdir())


def at_the_end(folder: str, bad: int) -> tuple[str, bool, list[str]]:
    """Close a pipe whose save in the background fails.

    Returns the error's message, whether the model has all trained values, and what lies in the folder."""
    message = ""
    model = jobs.model(1)
    pipe = autopart.compile(model, "cpu:2", sample=jobs.batch(0), **PLAN)
    optimizer, scheduler = jobs.trainer(pipe)
    jobs.train(pipe, optimizer, scheduler, range(2))
    trained = pipe.state_dict()
    with full_disk(pipe.rank == bad):
        pipe.save(folder, optimizer, scheduler, wait=False)
        if pipe.rank == bad:
            _end_of_background(pipe)
    try:
        pipe.close()
    except AutopartError as error:
        message = f"{type(error).__name__}: {error}"
    whole = all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    return message, whole, sorted(path.name for path in Path(folder).iterdir())


def closed_beside_a_step(folder: str) -> str:
    """Close on rank 0 while a save goes on in the background and rank 1 makes a step; returns the error's message."""
    may_go_on, plain_write = threading.Event(), part.write_part
    message = ""

    def late(*args: Any) -> None:
        assert may_go_on.wait(60)
        plain_write(*args)

    pipe = autopart.compile(jobs.model(1), "cpu:2", sample=jobs.batch(0), **PLAN)
    optimizer, scheduler = jobs.trainer(pipe)
    jobs.train(pipe, optimizer, scheduler, range(1))
    pipe.save(folder, optimizer, scheduler)
    jobs.train(pipe, optimizer, scheduler, range(1, 2))
    part.write_part = late
    try:
        pipe.save(folder, optimizer, scheduler, wait=False)
        threading.Timer(0.5, may_go_on.set).start()  # while the ranks disagree, or after it
        if pipe.rank == 0:
            pipe.close()
        else:
            pipe.step(jobs.batch(2))
    except AutopartError as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        part.write_part = plain_write
        with suppress(AutopartError):  # rank 0 has left
            pipe.close()
    return message


def _end_of_background(pipe: autopart.Pipe) -> None:
    """Wait until the save in the background has failed here, so that the next call knows."""
    background = pipe._core.part(Checkpoints).background
    if background is not None:
        background.join()


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "wait"), [pytest.param(0, True, marks=pytest.mark.slow), (1, False)])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_training_goes_on(
    pair: Workers, tmp_path: Path, bad: int, wait: bool
) -> None:
    for message, newest, expected, losses, loaded, left in pair.run(on_a_full_disk, str(tmp_path), bad, wait):
        assert message.startswith("CheckpointError: the checkpoint cannot be written") and f"rank {bad}" in message
        assert newest.endswith("step-00000002")
        assert losses == expected
        assert loaded == 5
        assert left == [".lock", ".order", "latest", "step-00000002", "step-00000005"]


def test_a_save_that_fails_beside_the_last_step_is_raised_by_close_which_still_brings_the_weights_together(
    pair: Workers, tmp_path: Path
) -> None:
    for message, whole, left in pair.run(at_the_end, str(tmp_path), 1):
        assert message.startswith("CheckpointError: the checkpoint cannot be written") and "rank 1" in message
        assert whole and left == [".lock"]


def test_a_rank_that_closes_while_another_one_steps_beside_a_save_harms_no_checkpoint(
    pair: Workers, tmp_path: Path
) -> None:
    assert all("ranks 0 and 1 make different calls" in said for said in pair.run(closed_beside_a_step, str(tmp_path)))
    model = checkpoint_jobs.model(2)
    autopart.load_into(model, tmp_path)
    assert str(autopart.latest(tmp_path)).endswith(("step-00000001", "step-00000002"))
    last = autopart.save_from(model, tmp_path, step=9)  # the ranks live, and do not hold the folder any more
    assert autopart.latest(tmp_path) == last and not list(tmp_path.glob("*.tmp"))
