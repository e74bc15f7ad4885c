"""Random small loss programs for property tests.

A program is a list of steps over a growing list of values; the first four are the inputs x (rows, 3, 4), y (rows, 4),
class numbers t (rows) and a mask m (rows, 3). Steps that fail at the tested sizes are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from support.oracles.loss_oracle import MICRO_ROWS, Term, Terms

Step = tuple[str, tuple[int, ...]]
Op = Callable[..., torch.Tensor]

UNARY: dict[str, Op] = {
    "tanh": lambda s, n, a: a.tanh(),
    "exp": lambda s, n, a: (a * 0.3).exp(),
    "square": lambda s, n, a: a**2,
    "negate": lambda s, n, a: 1 - a,
    "times w": lambda s, n, a: a * s.w,
    "linear": lambda s, n, a: F.linear(a, s.k, s.w),
    "matmul": lambda s, n, a: s.k @ a,
    "positive": lambda s, n, a: a > 0,
    "double": lambda s, n, a: a.double(),
    "index": lambda s, n, a: (a.abs() * 10).long() % 4,
    "clamp": lambda s, n, a: a.clamp(min=1),
    "per row": lambda s, n, a: a / n,
    "by rows": lambda s, n, a: a * n,
    "per element": lambda s, n, a: a / a.numel(),
    "plus rows": lambda s, n, a: a + n,
    "transpose": lambda s, n, a: a.transpose(0, 1),
    "mT": lambda s, n, a: a.mT,
    "permute": lambda s, n, a: a.permute(2, 0, 1),
    "flatten": lambda s, n, a: a.flatten(0, 1),
    "features": lambda s, n, a: a.flatten(1),
    "by four": lambda s, n, a: a.reshape(-1, 4),
    "rows first": lambda s, n, a: a.reshape(n, -1),
    "sequence first": lambda s, n, a: a.reshape(3, n, 4),
    "front axis": lambda s, n, a: a.unsqueeze(0),
    "last axis": lambda s, n, a: a.unsqueeze(-1),
    "sum all": lambda s, n, a: a.sum(),
    "mean all": lambda s, n, a: a.mean(),
    "std": lambda s, n, a: a.std(),
    "layer norm": lambda s, n, a: F.layer_norm(a, (a.shape[-1],)),
    "layer norm all": lambda s, n, a: F.layer_norm(a, tuple(a.shape)),
    "group norm": lambda s, n, a: F.group_norm(a, 1),
    "pool": lambda s, n, a: F.avg_pool1d(a, 2),
    "pool 2d": lambda s, n, a: F.max_pool2d(a, 2),
    "embed": lambda s, n, a: F.embedding(a, s.k),
    "one hot": lambda s, n, a: F.one_hot(a, 4),
    "pad": lambda s, n, a: F.pad(a, (0, 1)),
    "pick all": lambda s, n, a: a[torch.arange(a.shape[0])],
    "drop first": lambda s, n, a: a[1:],
    "drop second": lambda s, n, a: a[:, 1:],
    "first": lambda s, n, a: a[0],
    "second": lambda s, n, a: a[:, 0],
    "as many as rows": lambda s, n, a: a[:n],
    "repeat": lambda s, n, a: a.repeat(2, *([1] * (a.dim() - 1))),
    "repeat rows": lambda s, n, a: a.repeat(n, *([1] * (a.dim() - 1))),
    "interleave": lambda s, n, a: a.repeat_interleave(2, 0),
    "expand": lambda s, n, a: a.expand(n, *a.shape),
    "half": lambda s, n, a: a.chunk(2, 0)[0],
    "unbind": lambda s, n, a: a.unbind(1)[0],
    "zeros": lambda s, n, a: torch.ones_like(a),
}
for _axis in (0, 1, -1):
    for _name, _op in {
        "sum": torch.sum,
        "mean": torch.mean,
        "softmax": torch.softmax,
        "amax": torch.amax,
        "flip": lambda a, d: a.flip(d),
        "cumsum": torch.cumsum,
        "sort": lambda a, d: a.sort(d)[0],
        "argmax": torch.argmax,
        "any": lambda a, d: (a > 0).any(d),
    }.items():
        UNARY[f"{_name} {_axis}"] = lambda s, n, a, op=_op, d=_axis: op(a, d)
    UNARY[f"mean {_axis} kept"] = lambda s, n, a, d=_axis: a.mean(d, keepdim=True)
BINARY: dict[str, Op] = {
    "add": lambda s, n, a, b: a + b,
    "sub": lambda s, n, a, b: a - b,
    "mul": lambda s, n, a, b: a * b,
    "div": lambda s, n, a, b: a / (b.abs() + 0.5),
    "ratio": lambda s, n, a, b: a / b,
    "where": lambda s, n, a, b: torch.where(a > 0, a, b),
    "product": lambda s, n, a, b: a @ b,
    "scores": lambda s, n, a, b: a @ b.mT,
    "per batch": lambda s, n, a, b: torch.einsum("b...d,bd->b...", a, b),
    "over batch": lambda s, n, a, b: torch.einsum("b...,b...->...", a, b),
    "attention": lambda s, n, a, b: F.scaled_dot_product_attention(a, b, b),
    "cross entropy": lambda s, n, a, b: F.cross_entropy(a, b, ignore_index=1),
    "cross entropy, weighed": lambda s, n, a, b: F.cross_entropy(a, b, weight=s.c, ignore_index=1),
    "cross entropy, none": lambda s, n, a, b: F.cross_entropy(a, b, reduction="none"),
    "cross entropy, sum": lambda s, n, a, b: F.cross_entropy(a, b, reduction="sum"),
    "mse": lambda s, n, a, b: F.mse_loss(a, b),
    "cosine": lambda s, n, a, b: F.cosine_similarity(a, b, dim=-1),
    "pick": lambda s, n, a, b: a[torch.arange(n), b],
    "take": lambda s, n, a, b: a[b],
    "take second": lambda s, n, a, b: a[:, b],
    "gather": lambda s, n, a, b: a.gather(-1, b.unsqueeze(-1)),
    "join": lambda s, n, a, b: torch.cat([a, b], 0),
    "join second": lambda s, n, a, b: torch.cat([a, b], 1),
    "stack": lambda s, n, a, b: torch.stack([a, b], 0),
    "stack second": lambda s, n, a, b: torch.stack([a, b], 1),
    "like": lambda s, n, a, b: a.expand_as(b),
    "place": lambda s, n, a, b: a.slice_scatter(b[:, :1], 1, 0, 1),
}
CONSTANT: dict[str, Op] = {
    "k": lambda s, n: s.k.tanh(),
    "ones": lambda s, n: torch.ones(n, 1, dtype=torch.float64),
    "shares": lambda s, n: torch.full((n, 1), 1.0 / n, dtype=torch.float64),
    "rows": lambda s, n: torch.full((4,), n, dtype=torch.float64),
    "row numbers": lambda s, n: torch.arange(n),
    "three to a row": lambda s, n: torch.arange(3 * n),
    "as many of k": lambda s, n: s.k[:n],
    "one of k": lambda s, n: s.k[n % 3],
    "identity": lambda s, n: torch.eye(n, dtype=torch.float64),
}
OPS = UNARY | BINARY | CONSTANT
ENDS: dict[str, Op] = {
    "sum": lambda s, n, z, q: z.sum(),
    "mean": lambda s, n, z, q: z.mean(),
    "mean + 1": lambda s, n, z, q: z.mean() * 0.5 + 1,
    "sum / rows": lambda s, n, z, q: z.sum() / n,
    "masked mean": lambda s, n, z, q: (z * q).sum() / q.sum(),
    "mean of masked": lambda s, n, z, q: (z * q.double()).mean() / q.double().mean(),
    "sum by count": lambda s, n, z, q: z.sum() / q.sum(),
    "floored": lambda s, n, z, q: (z * q).sum() / q.sum().clamp(min=2),
    "sum + mean": lambda s, n, z, q: (z.sum() + z.mean() * 0.5) / 3,
    "sum + masked mean": lambda s, n, z, q: 0.1 * z.square().sum() + (z * q).sum() / q.sum() - s.v,
    "stack": lambda s, n, z, q: torch.stack([z.sum(), z.mean(), s.v, q.double().mean()]).mean(),
}


@dataclass(frozen=True)
class Program:
    """steps: ops and the positions of their operands; end: how the last value becomes a loss, with the sign of
    `mask`.
    """

    steps: tuple[Step, ...]
    end: str
    mask: int

    @property
    def term(self) -> Term:
        """The program as a loss function."""

        def loss(s: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
            values, rows = self.values(s, inputs), inputs[0].shape[0]
            z = values[-1].double()
            z = z * s.w if z.dim() > 1 and z.shape[-1] == 4 else z * s.v
            return ENDS[self.end](s, rows, z, values[self.mask] > 0)

        return loss

    def values(self, s: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the inputs and the result of every step."""
        values, rows = list(inputs), inputs[0].shape[0]
        for name, operands in self.steps:
            values.append(OPS[name](s, rows, *(values[i] for i in operands)))
        return values


def program(source: random.Random, data: tuple[torch.Tensor, ...]) -> Program:
    """Return a program that runs on the whole batch, with a finite loss, and on each micro-batch."""
    model = Terms([], {})
    pieces = list(zip(*(tensor.split(list(MICRO_ROWS)) for tensor in data), strict=True))
    made = Program((), source.choice(list(ENDS)), source.randrange(4))
    wanted = source.randint(1, 6)
    for _ in range(40 * wanted):
        name = source.choice(list(OPS))
        count = 1 if name in UNARY else 2 if name in BINARY else 0
        places = len(made.steps) + 4
        operands = tuple(places - 1 if source.random() < 0.6 else source.randrange(places) for _ in range(count))
        longer = Program((*made.steps, (name, operands)), made.end, made.mask)
        if _runs(longer, model, data, finite=True) and all(_runs(longer, model, piece) for piece in pieces):
            made = longer
        if len(made.steps) == wanted:
            break
    return made


def _runs(candidate: Program, model: nn.Module, inputs: tuple[torch.Tensor, ...], *, finite: bool = False) -> bool:
    try:
        loss = candidate.term(model, *inputs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return (
        loss.dim() == 0 and (not finite or bool(loss.isfinite())) and candidate.values(model, inputs)[-1].numel() < 2000
    )
