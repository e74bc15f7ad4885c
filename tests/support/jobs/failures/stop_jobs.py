"""Steps in which a rank is asked to stop."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopart
from autopart.runtime.group import world
from autopart.runtime.watch.stop_signals import SIGNALS, StopSignals, stop_signals
from support.jobs import asynchronous_jobs
from support.jobs.failures import failing_jobs, run_script

ELSEWHERE = signal.SIGUSR1


def in_a_step(rank: int, phase: str) -> tuple[list[bool], bool, bool]:
    """Signal a rank while it is in its step number 1, in a phase, and a handler of the user's is installed.

    Returns `stop_requested` after each step, whether it stays True after `close`, and whether everything about signals
    was as it should be."""
    seen: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    before = [signal.getsignal(number) for number in SIGNALS]
    asked = []
    options = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", **run_script.STAGES}
    own = mock.patch.object(world, "stop_signals", StopSignals())  # others hold pipes that earlier jobs left open
    try:
        with own, autopart.compile(run_script.Net(), "cpu:2", sample=run_script.batch(0), **options) as pipe:
            inside = [signal.getsignal(number) for number in SIGNALS]
            for step in range(3):
                now = step == 1 and pipe.rank == rank
                with failing_jobs.armed(phase, _terminate, 2) if now else contextlib.nullcontext():
                    pipe.step(run_script.batch(step))
                asked.append(pipe.stop_requested)
        after = [signal.getsignal(number) for number in SIGNALS]
        heard = seen == ([signal.SIGTERM] if pipe.rank == rank else [])
        return asked, pipe.stop_requested, heard and after == before and not set(map(id, inside)) & set(map(id, before))
    finally:
        signal.signal(signal.SIGTERM, handler)


def in_training(rank: int, batch: int) -> tuple[list[bool], int]:
    """Signal a rank when it gives a batch to `pipe.train`.

    Returns `stop_requested` with each loss up to the first True, and the steps that were taken then."""
    given = asynchronous_jobs.batches(12)
    asked: list[bool] = []
    options = asynchronous_jobs.options(2, "pipedream", 1)
    try:
        with autopart.compile(asynchronous_jobs.net(2), "cpu:2", sample=given[0], **options) as pipe:

            def batches() -> Any:
                for number, each in enumerate(given):
                    if (number, pipe.rank) == (batch, rank):
                        os.kill(os.getpid(), ELSEWHERE)
                    yield each

            for _ in pipe.train(batches(), optimizer=asynchronous_jobs.sgd):
                asked.append(pipe.stop_requested)
                if pipe.stop_requested:
                    break
            pipe.flush()
            return asked, pipe.steps
    finally:
        _forget()


def between_calls(rank: int) -> list[bool]:
    """Signal a rank between two calls; returns `stop_requested` before it, right after it, and after the next call."""
    model = nn.Linear(4, 4)
    options = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "replicas": 2, "stages": 1}
    sample = torch.ones(4, 4), torch.ones(4, 4)
    try:
        with autopart.compile(model, "cpu:2", sample=sample, **options) as pipe:
            asked = [pipe.stop_requested]
            if pipe.rank == rank:
                os.kill(os.getpid(), ELSEWHERE)
            asked.append(pipe.stop_requested)
            pipe.predict(sample[0])
            return [*asked, pipe.stop_requested]
    finally:
        _forget()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    stop_signals.asked = 0


def ignore_stops(seconds: float) -> None:
    """Go on whatever comes, for some seconds."""
    import time

    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    os.write(1, b"ready\n")  # in one piece: two ranks share the pipe
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
