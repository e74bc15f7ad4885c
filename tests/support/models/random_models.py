"""Random small modules for property tests of cutting: sequences of ops over a growing list of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

WIDTH = 4
Step = tuple[str, int, int]


class Random(nn.Module):
    """Runs `steps`, each (op, i, j): the op reads values i and j (modulo the number of values) and appends its results.

    The loss is a sum over rows, so that losses and gradients of micro-batches add up.
    """

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        torch.manual_seed(len(steps))
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.linears[1].requires_grad_(False)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, nothing: None = None) -> torch.Tensor:
        floats, whole = [x], [ids]
        normed = False
        for op, i, j in self.steps:
            if op == "norm" and normed:
                continue
            normed |= op == "norm"
            a, b, n = floats[i % len(floats)], floats[j % len(floats)], whole[j % len(whole)]
            for result in OPS[op](self, a, b, n):
                (floats if result.is_floating_point() else whole).append(result)
        last = sum(value.sum() for value in floats[-2:])
        return last + (floats[-1] * whole[-1]).sum() * 0.1


def _in_place(m: Random, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    changed = a.clone()
    changed[:, :2] *= b[:, 2:]
    changed += 1
    return (changed,)


def _no_grad(m: Random, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        factor = torch.sigmoid(b)
    return (a * factor,)


def _two(m: Random, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    left, right = a.chunk(2, dim=1)
    return torch.cat([right, left], 1), left.sum(1, keepdim=True) * b


def _sorted(m: Random, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, order = a.sort(dim=1)
    return values, order


OPS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "linear": lambda m, a, b, n: (m.linears[0](a),),
    "frozen": lambda m, a, b, n: (m.linears[1](a),),
    "tanh": lambda m, a, b, n: (torch.tanh(m.linears[2](a)),),
    "add": lambda m, a, b, n: (a + b,),
    "mul": lambda m, a, b, n: (torch.tanh(a) * torch.tanh(b),),
    "scale": lambda m, a, b, n: (a * m.scale,),
    "table": lambda m, a, b, n: (a + torch.cos(m.table * 2),),
    "range": lambda m, a, b, n: (a * torch.arange(WIDTH).float().sin(),),
    "embed": lambda m, a, b, n: (m.embedding(n).mean(1) + a,),
    "gather": lambda m, a, b, n: (a.gather(1, n),),
    "where": lambda m, a, b, n: (torch.where(n > 1, a, b),),
    "flip": lambda m, a, b, n: ((n * 3 + 1) % WIDTH,),
    "transpose": lambda m, a, b, n: (torch.stack([a, b], 1).transpose(1, 2)[:, :, 0],),
    "detach": lambda m, a, b, n: (a.detach() * b,),
    "norm": lambda m, a, b, n: (m.norm(a),),
    "in_place": _in_place,
    "no_grad": _no_grad,
    "two": _two,
    "sorted": _sorted,
}
RANDOM_OPS = {"dropout": lambda m, a, b, n: (F.dropout(a, 0.4),), "noise": lambda m, a, b, n: (a + torch.rand_like(b),)}
OPS |= RANDOM_OPS


def steps(*, random: bool = False) -> st.SearchStrategy[tuple[Step, ...]]:
    """Return a strategy for 3 to 12 ops. random: at least one draws random numbers, otherwise none does."""
    names = [name for name in OPS if random or name not in RANDOM_OPS]
    place = st.integers(0, 12)
    found = st.lists(st.tuples(st.sampled_from(names), place, place), min_size=3, max_size=12).map(tuple)
    return found.filter(lambda drawn: any(name in RANDOM_OPS for name, _, _ in drawn)) if random else found


def batch_of(rows: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WIDTH, (rows, WIDTH), generator=generator)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "ids": ids, "nothing": None}
