"""What forward() changes of the Python around it cannot be frozen: refused by name, wherever it stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import RefusedError

COUNT = 0
COUNTS = {"calls": 0}
CALLS = [1.0]
TABLES: dict[str, torch.Tensor] = {}
PYTHONS, NUMPYS = random.Random(0), numpy.random.default_rng(0)


class Meter:
    level = 0

    def __call__(self) -> int:
        self.level += 1
        return self.level


METER = Meter()


def _global() -> float:
    global COUNT
    COUNT += 1
    return COUNT


def _table() -> float:
    COUNTS["calls"] += 1
    return COUNTS["calls"]


def _list() -> float:
    CALLS.append(1.0)
    return len(CALLS)


def _closure() -> Callable[[], float]:
    level = 0

    def count() -> float:
        nonlocal level
        level += 1
        return level

    return count


class Model(nn.Module):
    """Weighs its loss by a factor of Python."""

    calls = 0

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() * self.factor()


class OfItsClass(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.linear(x).square().mean() * type(self).calls


def _filled() -> torch.Tensor:
    if "ones" not in TABLES:
        TABLES["ones"] = torch.ones(())
    return TABLES["ones"]


CHANGES = {
    "a global": (_global, "COUNT"),
    "a global table": (_table, "COUNTS"),
    "a global list": (_list, "CALLS"),
    "a variable of a closure": (_closure(), "level"),
    "an object that counts": (lambda: METER(), "METER"),
    "a generator of Python": (lambda: 1 + PYTHONS.random(), "PYTHONS"),
    "a generator of numpy": (lambda: 1 + float(NUMPYS.random()), "NUMPYS"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_changes_around_it_is_refused_by_name(name: str) -> None:
    factor, place = CHANGES[name]
    with pytest.raises(RefusedError, match=place) as caught:
        capture(Model(factor), flatten(torch.ones(2, 4)))
    assert caught.value.fix


def test_a_counter_of_the_class_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"OfItsClass.calls"):
        capture(OfItsClass(lambda: 1), flatten(torch.ones(2, 4)))


def test_a_table_of_tensors_that_the_first_call_fills_is_no_change() -> None:
    assert capture(Model(_filled), flatten(torch.ones(2, 4))).graph.ops
