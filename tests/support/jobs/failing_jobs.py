"""A model with an op that kills its process or raises when it is called, and jobs that meet it at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from support.models.peer_models import WIDTH, Stack, pair
from support.models.small_models import Small

_armed: dict[str, Any] = {}


def _strike(phase: str) -> None:
    """What was armed happens at the n-th call in that phase."""
    if _armed.get("phase") != phase:
        return
    _armed["calls"] -= 1
    if _armed["calls"] == 0:
        if callable(_armed["how"]):
            _armed["how"]()
            return
        if _armed["how"] == "kill":
            die(_armed["clock"])
        raise RuntimeError("the op gave up")


def arm(phase: str, how: str | Callable[[], None], calls: int, clock: str = "") -> None:
    """Let the op strike at its n-th call in a phase: "kill" or "raise", or a function that it calls."""
    _armed.update(phase=phase, how=how, calls=calls, clock=clock)


def die(clock: str) -> None:
    """SIGKILL this process, having written down when."""
    Path(clock).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@torch.library.custom_op("autopart_tests::trouble", mutates_args=())
def trouble(x: torch.Tensor) -> torch.Tensor:
    _strike("forward")
    return x.clone()


@torch.library.custom_op("autopart_tests::trouble_backward", mutates_args=())
def trouble_backward(grad: torch.Tensor) -> torch.Tensor:
    _strike("backward")
    return grad.clone()


trouble.register_fake(torch.empty_like)
trouble_backward.register_fake(torch.empty_like)
trouble.register_autograd(lambda ctx, grad: trouble_backward(grad))


class Fragile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return trouble(x)


class Troubled(Stack):
    """Four layers; the third ends in the op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile())


CASE = Small(Troubled, **pair(lambda output, target: ((output - target) ** 2).mean()))
CUTS = ["layers.1", "layers.2"]
WORLD = 3


def made(schedule: str = "1f1b") -> autopart.Pipe:
    """The pipe of every job here."""
    torch.set_num_threads(1)
    options = {"cuts": CUTS, "micro_batches": 4, "schedule": schedule, "loss_fn": CASE.loss_fn, "costs": "analytic"}
    return autopart.compile(CASE.model(), f"cpu:{WORLD}", sample=CASE.batch(8), **options)


def struck(phase: str, how: str, calls: int, clock: str, schedule: str = "1f1b") -> list[float]:
    """Train until the op on stage 2 strikes at its n-th call in a phase ("idle": between the steps)."""
    pipe = made(schedule)
    arm(phase, how, calls, clock)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(CASE.batch(8)).item())
        if phase == "idle" and pipe.rank == 2:
            die(clock)
        if phase == "idle" and pipe.rank == 1:
            threading.Event().wait()  # in code of the user, for ever
    return losses


def survivor() -> float:
    """A step with nothing armed."""
    _armed.clear()
    return made().step(CASE.batch(8)).item()


def forked(clock: str) -> None:
    """Rank 1 ends by itself, with an exit code, in the middle of a step."""
    pipe = made()
    pipe.step(CASE.batch(8))
    if pipe.rank == 1:
        Path(clock).write_text(repr(time.monotonic()))
        os._exit(3)
    pipe.step(CASE.batch(8))
