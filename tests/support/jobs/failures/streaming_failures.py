"""Asynchronous training in which something fails on one rank or on all of them, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import autopart
from support.jobs.asynchronous_jobs import Batch, batches, error_of, net, options, sgd
from support.jobs.failures import failing_jobs
from support.jobs.failures.failing_jobs import CASE

BATCH = 4
"""The batch with which something fails."""


@dataclass(frozen=True)
class Fault:
    """Something that fails on one rank, or on all for rank -1, while batches are in flight.

    place: "forward", "backward" (an op of stage 2), "optimizer", "scheduler", "data" or "body" (the user's own code),
    "flush" or "save" (the stage's last update in it).  how: "kill", "stop", "raise" or "hang", which never returns.
    clock: a file that gets the time at which it happens.
    """

    place: str
    how: str
    rank: int
    clock: str = ""
    schedule: str = "pipedream"

    def at(self, place: str, rank: int, number: int = BATCH) -> None:
        """Fail if this is the place, the rank and the batch."""
        if place == self.place and self.rank in (rank, -1) and number == BATCH:
            self.happen()

    def happen(self) -> None:
        if self.how == "raise":
            raise ValueError(f"the {self.place} gave up")
        Path(self.clock).write_text(repr(time.monotonic()))
        if self.how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


class Stepper(torch.optim.SGD):
    """An optimizer that fails with the update of one batch.  calls: of `step` so far."""

    def __init__(self, params: Any, before: Callable[[int], None]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.before, self.calls = before, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.before(self.calls - 1)
        return super().step(closure)


class Following:
    """In place of a scheduler of the learning rate.  after: called with the number of the update."""

    def __init__(self, after: Callable[[int], None]) -> None:
        self.after, self.calls = after, 0

    def step(self) -> None:
        self.calls += 1
        self.after(self.calls - 1)


def run(pipe: autopart.Pipe, data: list[Any], fault: Fault, folder: str = "") -> list[float]:
    """Train until the fault; return the losses.  folder: where a checkpoint is saved after the third loss, if given."""
    rank, losses = pipe.rank, []

    def given() -> Iterator[Any]:
        for number, batch in enumerate(data):
            fault.at("data", rank, number)
            yield batch

    made: list[Stepper] = []

    def optimizer(params: Any) -> Stepper:
        made.append(Stepper(params, lambda number: fault.at("optimizer", rank, number)))
        return made[0]

    def scheduler(of: Any) -> Following:
        return Following(lambda number: fault.at("scheduler", rank, number))

    for number, loss in enumerate(pipe.train(given(), optimizer=optimizer, scheduler=scheduler)):
        losses.append(loss.item())
        fault.at("body", rank, number)
        if number == 2 and (fault.place == "flush" or folder):
            made[0].before = lambda number: fault.at(fault.place, rank)
            pipe.save(folder, made[0]) if folder else pipe.flush()
    return losses


def ended(fault: Fault, folder: str = "") -> list[float]:
    """Train on three stages until the fault ends it."""
    with failing_jobs.open_pipe(fault.schedule, timeout=2 if fault.how == "hang" else None) as pipe:
        if fault.place in ("forward", "backward"):
            failing_jobs.arm(fault.place, fault.happen, 4 * BATCH + 1)
        return run(pipe, [CASE.batch(8) for _ in range(12)], fault, folder)


def caught(fault: Fault) -> dict[str, Any]:
    """On every rank of two: the error of training, what calls raise afterwards, and the weights that are left.

    fault: "short" in place of a place lets the batches of its rank end before the others' do.
    """
    torch.set_num_threads(1)
    data = batches(12)
    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, fault.schedule, 1)) as pipe:
        given = data[:BATCH] if (fault.place, fault.rank) == ("short", pipe.rank) else data
        raised = error_of(lambda: run(pipe, given, fault))
        left, steps = pipe.local_state_dict(), pipe.steps
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": pipe.state_dict, "flush": pipe.flush,
            "train": lambda: list(pipe.train(data, optimizer=sgd)), "adopt": lambda: pipe.adopt(pipe.plan),
        }  # fmt: skip
        after = {}
        for name, call in calls.items():
            after[name] = error_of(call)
            if name == "state_dict":
                flushed = pipe.local_state_dict()
        return {"raised": raised, "after": after, "left": left, "flushed": flushed, "steps": steps}


def left_early(schedule: str) -> dict[str, Any]:
    """On every rank: a loop that is left with `break`, one whose iterator is closed, and a plan that is refused."""
    torch.set_num_threads(1)
    data, ends = batches(12), []

    def given() -> Iterator[Batch]:
        try:
            yield from data
        finally:
            ends.append(pipe.steps)

    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, schedule, 1)) as pipe:
        losses = []
        for loss in pipe.train(given(), optimizer=plain_sgd):
            losses.append(loss.item())
            if len(losses) == 3:
                break
        broken = pipe.steps, pipe.state_dict()
        training = pipe.train(given(), optimizer=plain_sgd)
        losses += [next(training).item(), next(training).item()]
        training.close()
        losses += [loss.item() for loss in training]
        closed = pipe.steps, pipe.state_dict()
        training = pipe.train(given(), optimizer=plain_sgd)
        losses.append(next(training).item())
        wrong = replace(pipe.plan, decision=replace(pipe.plan.decision, world=3))
        refused = error_of(lambda: pipe.adopt(wrong))
        losses += [loss.item() for loss in training]
        return {
            "losses": losses, "ends": ends, "broken": broken, "closed": closed, "refused": refused,
            "end": pipe.state_dict(), "steps": pipe.steps,
        }  # fmt: skip


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    """An optimizer without a state, so that training may go on with another one."""
    return torch.optim.SGD(params, lr=0.1)


def adopting(schedules: list[tuple[str, dict[str, Any]]], each: int) -> list[tuple[list[float], Any]]:
    """On every rank: losses and weights after some batches under each schedule, with the options it needs."""
    torch.set_num_threads(1)
    data = batches(each * len(schedules))
    plans = [autopart.plan(net(4), "cpu:2", sample=data[0], **asked) for _, asked in schedules]
    found = []
    with autopart.compile(net(4), "cpu:2", sample=data[0], **schedules[0][1]) as pipe:
        for number, ((schedule, _), plan) in enumerate(zip(schedules, plans, strict=True)):
            own = data[number * each : number * each + each]
            if number:
                pipe.adopt(plan)
            assert pipe.plan.schedule == schedule
            if schedule in ("pipedream", "pipedream-2bw"):
                losses = [loss.item() for loss in pipe.train(own, optimizer=plain_sgd)]
            else:
                losses = []
                optimizer = plain_sgd(list(pipe.parameters()))
                for batch in own:
                    losses.append(pipe.step(batch).item())
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((losses, pipe.state_dict()))
    return found


def resumed(folder: str, schedule: str, micros: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """On every rank: the end of a training that saved a checkpoint on its way, and of one that goes on from it."""
    torch.set_num_threads(1)
    data, ends, made = batches(12), [], []

    def momentum(params: Any) -> torch.optim.Optimizer:
        made.append(sgd(params))
        return made[-1]

    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, schedule, micros)) as pipe:
        for number, _ in enumerate(pipe.train(data, optimizer=momentum)):
            if number == 4:
                pipe.save(folder, made[0])
                saved = pipe.steps
        ends.append(pipe.state_dict())
    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, schedule, micros)) as pipe:
        optimizer = sgd(list(pipe.parameters()))
        pipe.load(folder, optimizer)
        list(pipe.train(data[pipe.steps :], optimizer=lambda _: optimizer))
        ends.append(pipe.state_dict())
    return ends[0], ends[1], saved
