"""Errors of capture and loss analysis, each with a model that causes it and the model after following its advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autopart.ir.errors import (
    AutopartError,
    BatchError,
    CaptureError,
    RefusedError,
    UsageError,
)

Body = Callable[..., Any]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 4


class Net(nn.Module):
    """Three layers; `body` is forward(), `setup` changes the model first."""

    def __init__(self, body: Body, setup: Body | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.body = body
        if setup is not None:
            setup(self)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


@dataclass(frozen=True)
class Trial:
    """A model with its batch and compile options."""

    body: Body
    sample: Any = field(default_factory=lambda: X)
    setup: Body | None = None
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] | None = None

    def model(self) -> nn.Module:
        """Return the model in training mode."""
        return self.make() if self.make is not None else Net(self.body, self.setup)


@dataclass(frozen=True)
class Advice:
    """A refused model, its error, words of the advice, and the model after following it."""

    refused: Trial
    error: type[AutopartError]
    advises: str
    followed: Trial


def mean(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.run(x).mean()


def _whole(body: Body, sample: Any = X) -> tuple[Trial, Trial]:
    """Return a trial and the same trial with one micro-batch."""
    return Trial(body, sample), Trial(body, sample, options={"micro_batches": 1})


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _drawn(m: Net, x: torch.Tensor) -> torch.Tensor:
    return (m.run(x) * torch.rand(4, generator=torch.Generator().manual_seed(0))).mean()


def _opaque(m: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.histc(m.run(x), 4).sum() + m.run(x).sum()


def _contrast(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.run(x)
    return F.cross_entropy(hidden @ hidden.T, torch.arange(len(x)))


def _slope(m: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(m.run(x).sum(), m.layers[0].weight, create_graph=True)[0].square().mean()


def _converting(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.head = m.head.to(torch.float64)
    return m.head(m.run(x).double()).mean()


def _head(m: Net) -> None:
    m.head = nn.Linear(4, 1)


def _double_head(m: Net) -> None:
    m.head = nn.Linear(4, 1, dtype=torch.float64)


def _hooked(m: Net) -> None:
    m.layers[0].register_forward_hook(lambda module, args, out: out * 2)


def _views(m: Net) -> None:
    memory = m.layers[0].weight.data
    m.layers[1].weight = nn.Parameter(memory.view(4, 4))


def _tied(m: Net) -> None:
    m.layers[1].weight = m.layers[0].weight


def _state(m: Net) -> None:
    m.state = torch.zeros(4)


def _buffer(m: Net) -> None:
    m.register_buffer("state", torch.zeros(4))


def _counting(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.state += x.detach().mean(0)
    return m.run(x).mean()


def _lazy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), Mean())


def _called() -> nn.Module:
    model = _lazy()
    model(X)
    return model


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def _branching(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.run(x)
    return (hidden * 2 if hidden.sum() > 0 else hidden).mean()


RAGGED = torch.nested.nested_tensor([X[: row + 1] for row in range(8)], layout=torch.jagged)
GRADED = X.clone().requires_grad_()
LISTED = {"x": X, "labels": [{"place": torch.full((2,), float(i))} for i in range(8)]}
STACKED = {"x": X, "labels": torch.arange(8.0)[:, None].repeat(1, 2)}
ADVICE: dict[str, Advice] = {
    "contrastive": Advice(
        _whole(_contrast)[0], RefusedError, "micro_batches=1", _whole(_contrast)[1]),
    "contrastive, rewritten": Advice(
        Trial(_contrast), RefusedError, "write the loss as a mean", Trial(lambda m, x: m.run(x).square().mean())),
    "unknown op": Advice(
        *(lambda a, b: (a, RefusedError, "micro_batches=1", b))(
            *_whole(lambda m, x: torch.fft.fft(m.run(x), dim=0).abs().mean()))),
    "unknown op, rewritten": Advice(
        Trial(lambda m, x: torch.fft.fft(m.run(x), dim=0).abs().mean()), RefusedError, "operations that autopart knows",
        Trial(lambda m, x: torch.fft.fft(m.run(x), dim=1).abs().mean())),
    "opaque loss": Advice(
        Trial(_opaque), RefusedError, 'loss_reduction="mean"', Trial(_opaque, options={"loss_reduction": "sum"})),
    "a loss per row": Advice(
        Trial(lambda m, x: m.run(x).mean(1)), CaptureError, "return one number", Trial(mean)),
    "no loss": Advice(
        Trial(lambda m, x: {"logits": m.run(x)}), CaptureError, "loss_fn",
        Trial(lambda m, x: {"logits": m.run(x)}, (X, LABELS),
              options={"loss_fn": lambda out, y: F.cross_entropy(out["logits"], y)})),
    "branch on data": Advice(
        Trial(_branching), CaptureError, "torch.where",
        Trial(lambda m, x: torch.where(m.run(x) > 0, m.run(x) * 2, m.run(x)).mean())),
    "shape from data": Advice(
        Trial(lambda m, x: m.run(x)[x[:, 0] > 0].sum()), RefusedError, "operations with fixed shapes: torch.where",
        Trial(lambda m, x: torch.where(x[:, :1] > 0, m.run(x), 0.0).sum())),
    "number from data": Advice(
        Trial(lambda m, x: m.run(x).sum() * x.abs().amax(1).tolist()[0]), RefusedError, "keep it a tensor",
        Trial(lambda m, x: (m.run(x) * x.abs().amax(1, keepdim=True)).sum())),
    "numpy": Advice(
        Trial(lambda m, x: (m.run(x) * torch.from_numpy(x.numpy() * 2)).mean()), CaptureError, "with torch",
        Trial(lambda m, x: (m.run(x) * x * 2).mean())),
    "generator": Advice(
        Trial(_drawn), RefusedError, "leave generator= out", Trial(lambda m, x: (m.run(x) * torch.rand(4)).mean())),
    "custom function": Advice(
        Trial(lambda m, x: _Noisy.apply(m.run(x)).mean()), RefusedError, "torch's own ops",
        Trial(lambda m, x: (m.run(x) + torch.rand_like(x)).mean())),
    "gradient in forward": Advice(
        Trial(_slope), CaptureError, "torch.func.jvp",
        Trial(lambda m, x: torch.func.jvp(m.run, (x,), (torch.ones_like(x),))[1].square().mean())),
    "backward in forward": Advice(
        Trial(lambda m, x: mean(m, x).backward() or mean(m, x)), RefusedError, "return the sum", Trial(mean)),
    "conversion": Advice(
        Trial(_converting, setup=_head), RefusedError, "convert it before compile", Trial(
            lambda m, x: m.head(m.run(x).double()).mean(), setup=_double_head)),
    "hook": Advice(
        Trial(mean, setup=_hooked), RefusedError, "do its work in forward()",
        Trial(lambda m, x: torch.tanh(m.layers[1](torch.tanh(m.layers[0](x) * 2))).mean())),
    "hook on a tensor": Advice(
        Trial(lambda m, x: (lambda h: (h.register_hook(lambda g: g * 2), h.mean())[1])(m.run(x))), RefusedError,
        "take the hook out", Trial(mean)),
    "shared memory": Advice(Trial(mean, setup=_views), RefusedError, "the same nn.Parameter", Trial(mean, setup=_tied)),
    "state": Advice(Trial(_counting, setup=_state), CaptureError, "register_buffer", Trial(_counting, setup=_buffer)),
    "lazy": Advice(Trial(mean, make=_lazy), UsageError, "call the model once", Trial(mean, make=_called)),
    "nested": Advice(
        Trial(mean, RAGGED), BatchError, "pad it", Trial(mean, torch.nested.to_padded_tensor(RAGGED, 0.0))),
    "meta": Advice(Trial(mean, X.to("meta")), BatchError, "with numbers", Trial(mean)),
    "list of entries": Advice(
        Trial(lambda m, x, labels: mean(m, x), LISTED), BatchError, "stack them",
        Trial(lambda m, x, labels: F.mse_loss(m.run(x)[:, :2], labels), STACKED)),
    "gradient of the batch": Advice(
        Trial(mean, GRADED), BatchError, "detached", Trial(mean, GRADED.detach())),
}  # fmt: skip
