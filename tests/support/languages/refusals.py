"""A small model for tests of invalid input, functions to compile and plan it, and a check of the error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.ir.errors import AutopartError


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


X = batch()[0]


class Body(nn.Module):
    """One linear layer; `body` is its forward()."""

    def __init__(self, body: Callable[..., Any] = lambda m, x: m.linear(x).mean()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.state = torch.zeros(4)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def compiled(model: Any, sample: Any, cluster: Any = "cpu:1", **options: Any) -> autopart.Pipe:
    return autopart.compile(model, cluster, sample=sample, **{"costs": "analytic", **options})


def planned(cluster: str = "cpu:2", model: nn.Module | None = None, rows: int = 8, **options: Any) -> autopart.Plan:
    """Return a plan for the model, or a cached plan for `net()`."""
    if model is None:
        return _plan_of_net(cluster, rows, **options)
    return autopart.plan(
        model, cluster, sample=batch(rows), **{"costs": "analytic", "loss_fn": F.cross_entropy, **options}
    )


@cache
def _plan_of_net(cluster: str, rows: int, **options: Any) -> autopart.Plan:
    return planned(cluster, net(), rows, **options)


def refused(kind: type[AutopartError], *words: str) -> Any:
    """Return a context that expects exactly this error type, with a reason, place or fix, and these words in its
    text.
    """
    return _Refused(kind, words)


class _Refused:
    def __init__(self, kind: type[AutopartError], words: tuple[str, ...]) -> None:
        self._kind, self._words = kind, words

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        assert type(error) is self._kind, repr(error)
        for word in self._words:
            assert word in str(error), str(error)
        assert error.fix or error.where or error.why, str(error)
        return True
