"""A step begins before the ranks have agreed on it; what the agreement protects against is refused as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from support.jobs.step_jobs import refusal_of
from support.workers import Workers
from torch import nn
from torch.distributed import PrefixStore

import autopart
from autopart.ir.errors import BatchError, UsageError
from autopart.runtime.group.rendezvous import launchers_store
from autopart.runtime.stages.stage import StageRunner

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


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "counted"), [(1, True), (2, False)])
def test_the_first_rank_computes_before_others_make_the_step(pair: Workers, stages: int, counted: bool) -> None:
    first, second = pair.run(begun_before_the_other_rank, stages, counted)
    assert first == second


@pytest.mark.parametrize(
    ("stages", "kind", "error", "counted"),
    [
        (1, "call", UsageError, True),
        (2, "call", UsageError, False),
        (1, "rows", BatchError, False),
        (2, "rows", BatchError, True),
    ],
)
def test_ranks_that_do_different_things_are_told_and_the_next_step_is_as_without_it(
    pair: Workers, stages: int, kind: str, error: type, counted: bool
) -> None:
    for found, before, after in pair.run(refused_after_beginning, stages, kind, counted):
        assert type(found) is error and "different" in found.what, found
        assert before == after


@pytest.mark.parametrize(
    ("kind", "what", "counted"), [("data", "different batches", True), ("none", "no batch", False)]
)
def test_replicas_with_other_data_or_none_are_refused_after_their_forward(
    pair: Workers, kind: str, what: str, counted: bool
) -> None:
    for found, before, after in pair.run(refused_after_beginning, 1, kind, counted):
        assert type(found) is BatchError and what in found.what
        assert before == after
