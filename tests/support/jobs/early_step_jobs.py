"""Jobs of the tests of steps that begin before the ranks have agreed on them; each runs on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import PrefixStore

import autopart
from autopart.runtime.group.rendezvous import launchers_store
from autopart.runtime.stages.stage import StageRunner
from support.jobs.step_jobs import refusal_of

ROWS = 8
MINUTE = timedelta(seconds=60)


def batch(rows: int = ROWS, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(rows, 6, generator=source), torch.randint(0, 3, (rows,), generator=source)
    targets[0] = -100  # ignored, so micro-batches have other shares of the loss
    return inputs, targets


def all_rows(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose shares follow from the rows alone."""
    return (output - targets.unsqueeze(1).clamp(min=0)).square().mean()


def opened(stages: int, *, counted: bool = True, **options: Any) -> autopart.Pipe:
    """Open a pipe over two ranks that knows batches of 8 and of 4 rows, without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    pipe = autopart.compile(
        model, "cpu:2", sample=batch(), loss_fn=nn.functional.cross_entropy if counted else all_rows, stages=stages,
        replicas=2 // stages, micro_batches=2, costs="analytic", **options,
    )  # fmt: skip
    for rows in (ROWS, 4, ROWS):
        pipe.step(batch(rows))
    forget(pipe)
    return pipe


def forget(pipe: autopart.Pipe) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


@contextmanager
def told(store: PrefixStore, key: str) -> Iterator[None]:
    """Set a key of the store when this rank runs a forward."""
    plain = StageRunner.forward

    def forward(runner: StageRunner, *args: Any, **kwargs: Any) -> Any:
        store.set(key, "")
        return plain(runner, *args, **kwargs)

    with mock.patch.object(StageRunner, "forward", forward):
        yield


def begun_before_the_other_rank(stages: int, counted: bool) -> float:
    """Return the loss of a step that rank 1 makes only after rank 0 has run a forward of it."""
    with opened(stages, counted=counted, zero=0) as pipe:
        store = PrefixStore("early", launchers_store(60.0)[0])
        if pipe.rank == 0:
            with told(store, "begun"):
                return pipe.step(batch()).item()
        store.wait(["begun"], MINUTE)
        return pipe.step(batch()).item()


def refused_after_beginning(stages: int, kind: str, counted: bool) -> tuple[Any, list[float], list[float]]:
    """Return the error of a step in which the ranks do different things; losses and gradients of a step without it, and
    of the step that follows it."""
    with opened(stages, counted=counted) as pipe:
        calls: dict[str, Callable[[], Any]] = {
            "call": lambda: pipe.eval_loss(batch()) if pipe.rank else pipe.step(batch()),
            "rows": lambda: pipe.step(batch(4 if pipe.rank else ROWS)),
            "data": lambda: pipe.step(batch(seed=2 + pipe.rank)),
            "none": lambda: pipe.step(None if pipe.rank else batch()),
        }
        before = _numbers(pipe)
        error = refusal_of(calls[kind])
        left = [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
        assert not left, left
        return error, before, _numbers(pipe)


def _numbers(pipe: autopart.Pipe) -> list[float]:
    """Return the loss of a step and all gradients of it, on every rank."""
    loss = pipe.step(batch()).item()
    grads = [grad.flatten() for grad in pipe.gradients().values() if grad is not None]
    forget(pipe)
    return [loss, *torch.cat(grads).tolist()]
