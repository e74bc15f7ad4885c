"""The road of a batch: what is exchanged, made and touched in a step of a kind that came before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.batch.batch import Batch
from autopart.runtime.group.world import World
from autopart.runtime.player import BatchPlan
from autopart.stagecode.stage_code import StageCode

Counted = Callable[[type, str], list[Any]]


def batch(width: int = 4, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 3, width), torch.zeros(rows, dtype=torch.int64)


@pytest.fixture
def pipe() -> Iterator[autopart.Pipe]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(12, 5))
    options: dict[str, Any] = {"costs": "analytic", "micro_batches": 4, "loss_fn": nn.functional.cross_entropy}
    with autopart.compile(model, "cpu:1", sample=batch(), **options) as pipe:
        yield pipe


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Every later call of a method is noted in the list."""

    def count(owner: type, name: str) -> list[Any]:
        calls: list[Any] = []
        method = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
        return calls

    return count


def test_a_step_of_a_known_kind_takes_an_exchange_in_the_background_and_one_behind_it(
    pipe: autopart.Pipe, counted: Counted
) -> None:
    begun, waited = counted(World, "begin_reducing"), counted(World, "reduce_numbers")
    lengths = []
    for _ in range(3):
        pipe.step(batch())
        lengths.append((len(begun), len(waited)))
        begun.clear()
        waited.clear()
    assert lengths == [(3, 2), (2, 1), (2, 1)]  # the first makes what those with these rows take


def test_kinds_of_batches_that_alternate_are_made_ready_once(pipe: autopart.Pipe, counted: Counted) -> None:
    made = counted(StageCode, "add")
    losses = [pipe.step(batch(width)).item() for width in (4, 6, 4, 6)]
    assert len(made) == 1 and losses[:2] == losses[2:]


def test_a_warm_step_hands_its_batch_to_ten_objects_at_most(pipe: autopart.Pipe) -> None:
    pipe.step(batch())
    touched: dict[str, None] = {}

    def note(frame: FrameType, event: str, value: Any) -> None:
        owner = frame.f_locals.get("self")
        if event not in ("call", "return") or not type(owner).__module__.startswith("autopart."):
            return
        given = [*frame.f_locals.values(), value] if event == "return" else list(frame.f_locals.values())
        if any(isinstance(item, Batch | BatchPlan) for item in given):
            touched[type(owner).__name__] = None

    sys.setprofile(note)
    try:
        pipe.step(batch())
    finally:
        sys.setprofile(None)
    assert {"Session", "BatchReader", "Executor", "Engine"} <= touched.keys()
    assert len(touched.keys() - {"Batch", "BatchPlan"}) <= 10, list(touched)
