"""Models that other pipeline systems reject or compute incorrectly, with a batch and a loss for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models.small_models import Normed, Small, floats, integers, linear, mse, regression

WIDTH = 6


class Stack(nn.Module):
    """Four layers of one class; subclasses change what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Skips(Stack):
    """Every layer reads every earlier result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(torch.stack(seen).sum(0))))
        return seen[1] * seen[-1] + seen[0] + seen[2]


class Rotary(Stack):
    """A float table made at the start and used by every layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(WIDTH).float() / 3
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = torch.tanh(layer(x * cos + x.flip(-1) * sin))
        return x


class LateInputs(Stack):
    """The last layers use a boolean mask, an integer index, a number and None; one input is never used."""

    def forward(self, x: Any, *, mask: Any, index: Any, scale: float, nothing: Any, unused: Any, labels: Any) -> Any:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = x.masked_fill(mask, 0.0) if nothing is None else x
        x = self.layers[3](x) * scale
        return {"loss": mse(x.gather(1, index), labels), "logits": x}


def late_batch(rows: int) -> dict[str, Any]:
    return {
        "x": floats(rows, WIDTH),
        "mask": floats(rows, WIDTH, seed=2) > 0.5,
        "index": integers(WIDTH, rows, 2),
        "scale": 1.5,
        "nothing": None,
        "unused": floats(rows, 2),
        "labels": floats(rows, 2, seed=3),
    }


class Tied(nn.Module):
    """Embedding and head are one parameter, with layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.body = Stack()
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(self.embedding(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def tokens(rows: int, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels; row i ignores a different number of labels, the first row all of them."""
    labels = integers(12, rows, length, seed=4)
    for row in range(rows):
        labels[row, (3 * row) % (length + 1) :] = -100
    return integers(12, rows, length), labels


class SharedByAll(nn.Module):
    """One weight in four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    forward = Stack.forward


class Aliases(nn.Module):
    """One module under two names, called three times, and its weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer
        self.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.layer, self.again, self.layer):
            x = torch.tanh(module(x))
        return F.linear(x, self.weight)


class Transposed(Stack):
    """Layers pass on tensors that are never contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).transpose(1, 2)
        return x[:, ::2].expand(2, -1, -1, -1).transpose(0, 1)


class RootParameters(nn.Module):
    """Parameters and a buffer of the root module that a cut separates."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            setattr(self, f"weight{i}", nn.Parameter(torch.randn(WIDTH, WIDTH) / 2))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = torch.tanh(x @ getattr(self, f"weight{i}") + self.shift)
        return x


class TwoOutputs(Stack):
    """Ops and layers with two results used in different places, one of them integer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.layers[0](x).chunk(2, dim=-1)
        x = torch.tanh(self.layers[1](torch.cat([right, left], -1)))
        values, order = x.sort(dim=-1)
        x = self.layers[2](values) * left.sum(-1, keepdim=True)
        best, place = x.max(dim=-1, keepdim=True)
        return self.layers[3](x) * best + order * place


class InPlace(Stack):
    """In-place changes of values and views, between and across layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.layers[0](x)
        x = kept.clone()
        x += 1
        x[:, :2] *= 2
        x = self.layers[1](x)
        view = x[:, 1:3]
        view.add_(kept[:, :2])
        kept.mul_(0.5)
        x = self.layers[2](F.relu(x, inplace=True) + 0)
        return self.layers[3](x).add_(kept)


class Frozen(Stack):
    """The first two layers are frozen; a frozen branch joins the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)
        self.side = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.side(x)


class MixedGrads(Stack):
    """Layers pass on values with a gradient, detached values and integers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) * y.detach() + y.argmax(-1, keepdim=True)
        return x


class UnusedGrad(Stack):
    """A parameter that does not reach the loss, and one reached by only one result of an op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[3](x)
        left, _ = torch.tanh(self.layers[1](self.layers[0](x))).split(WIDTH // 2, dim=-1)
        return self.layers[2](torch.cat([left, left], -1))


class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: torch.tanh(layer(value)), x, use_reentrant=False)
        return x


class Dropped(Stack):
    """Dropout after every layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x


class NormedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        self.body = Normed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(torch.relu(self.first(x)))


class Pictures(nn.Module):
    """A model of batch norms over images, which accepts single rows; with a branch and a norm without running
    statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3, track_running_stats=place != 1) for place in range(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = x + self.norms[1](self.second(x)) * torch.sigmoid(self.norms[2](self.third(x)))
        return self.last(x.mean((2, 3)))


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


def pair(loss: Any = mse, *, width: int = WIDTH) -> dict[str, Any]:
    return {"batch": regression(WIDTH, width), "loss_fn": loss}


PEERS = {
    "stack": Small(Stack, **pair()),
    "stack_sum": Small(Stack, **pair(summed)),
    "skips": Small(Skips, **pair()),
    "rotary": Small(Rotary, **pair()),
    "late_inputs": Small(LateInputs, late_batch),
    "tied": Small(Tied, tokens),
    "shared_by_all": Small(SharedByAll, **pair()),
    "aliases": Small(Aliases, **pair()),
    "transposed": Small(Transposed, lambda n: (floats(n, WIDTH, WIDTH), floats(n, 2, WIDTH // 2, WIDTH, seed=8)), mse),
    "root_parameters": Small(RootParameters, **pair()),
    "two_outputs": Small(TwoOutputs, **pair()),
    "in_place": Small(InPlace, **pair()),
    "frozen": Small(Frozen, **pair()),
    "mixed_grads": Small(MixedGrads, **pair()),
    "unused_grad": Small(UnusedGrad, **pair()),
    "checkpointed": Small(Checkpointed, **pair()),
    "dropped": Small(Dropped, **pair()),
    "batch_norm": Small(NormedStack, **pair(width=3), coupled=True),
    "pictures": Small(Pictures, lambda n: (floats(n, 3, 4, 4), floats(n, 2, seed=9)), mse, coupled=True),
    "linear": Small(lambda: nn.Sequential(linear(WIDTH, WIDTH), nn.ReLU(), linear(WIDTH, WIDTH)), **pair()),
}
