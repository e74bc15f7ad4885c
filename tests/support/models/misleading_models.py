"""Models that could silently mislead a capture, and changes made to them between steps.

A script is a model, its batches, and changes, which are functions applied alike to the pipe's model and to the
reference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


def X(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def seeded(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(0))


def Y(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(WIDTH, (rows,), generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Four layers with tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.l:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean()


@dataclass(frozen=True)
class Script:
    """A model with batches and changes.

    model: builds the model; batches: one per step; change: function applied to the model before the step of that
    number; micros, options: for compile.
    """

    model: Callable[[], nn.Module]
    batches: tuple[Any, ...]
    change: dict[int, Callable[[nn.Module], Any]] = field(default_factory=dict)
    micros: int = 4
    options: dict[str, Any] = field(default_factory=dict)


class Reduction(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor, red: str) -> torch.Tensor:
        return F.cross_entropy(self.run(x), y, reduction=red)


class Ignored(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor, ignore: int) -> torch.Tensor:
        return F.cross_entropy(self.run(x), y, ignore_index=ignore)


class Axis(Net):
    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return (self.run(x).softmax(dim) * x).mean()


class Masked(Net):
    """Attention over T positions with a mask of shape (T, T)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.run(x)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).square().mean()


class Classes(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((self.run(x) * weight).logsumexp(1) - y).square().mean()


class Branch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean() * (2.0 if x.shape[0] >= 8 else 1.0)


class Renormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(20, WIDTH, max_norm=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.e(x)).square().mean()


class Counter(Net):
    n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.run(x).square().mean() * (0.1 if self.n < 2 else 1.0)


class Annealed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.1
        self.config = {"scale": [1.0, 2.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean() * self.beta * self.config["scale"][1]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.run(x))).pow(4).mean()


class PythonRandom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean() * (1 + random.random())


class OwnRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean() * (1 + self.rng.random())


class Length(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().sum() / (16 if x.shape[1] > 4 else x.shape[0])


class Inference(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.run(x)
        with torch.inference_mode():
            scale = h.mean(1, keepdim=True)
        return (h * scale.clone()).square().mean()


class Decorated(Net):
    @torch.inference_mode()
    def scale(self, h: torch.Tensor) -> torch.Tensor:
        return h.mean(1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.run(x)
        return (h * self.scale(h).clone()).square().mean()


class Memory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mem: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.run(x)
        if self.mem is not None:
            h = h + self.mem
        self.mem = h.detach().mean(0)
        return h.square().mean()


class Memories(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mems: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.run(x) + sum(self.mems)
        self.mems.append(h.detach().mean(0))
        return h.square().mean()


class Backward(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.run(x).square().mean()
        loss.backward(retain_graph=True)
        return loss


class NoGrad(Net):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class FirstFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.l[:2]:
            layer.requires_grad_(False)


ALPHA = 0.5


class Global(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).square().mean() * _alpha()


def _alpha() -> float:
    return ALPHA


def _set_alpha(model: nn.Module) -> None:
    globals()["ALPHA"] = 0.5 if ALPHA == 0.25 else 0.25


def setting(**values: Any) -> Callable[[nn.Module], None]:
    """Return a function that sets attributes of the model."""

    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model, name, value)

    return change


def _scale(model: Any) -> None:
    model.config["scale"][1] = 3.0


def _drop_in_training(model: Any) -> None:
    model.norm.momentum = 0.5


def _replace_weight(model: Any) -> None:
    model.l[1].weight = nn.Parameter(model.l[1].weight.detach() * 2)


def _replace_layer(model: Any) -> None:
    model.l[1] = nn.Linear(WIDTH, WIDTH)


def _patch(model: Any) -> None:
    model.forward = lambda x: model.run(x).square().sum()


def _hook(model: Any) -> None:
    model.l[1].register_forward_hook(lambda module, inputs, output: output * 2)


def _load(model: Any) -> None:
    model.load_state_dict({n: t * 2 for n, t in model.state_dict().items()}, assign=True)


def _unfreeze(model: Any) -> None:
    model.requires_grad_(True)


class Shortcut(Net):
    """Uses another loss for batches whose labels are all small, which may hold for a micro-batch but not for the
    batch.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y.max() >= WIDTH:
            raise ValueError("no such class")
        loss = F.cross_entropy(self.run(x), y)
        return loss if (y >= WIDTH // 2).any() else 3 * loss


class Weighted(Net):
    """Reads two tensor attributes, one as a tensor and one as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.factor = torch.ones(WIDTH), torch.tensor(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.run(x).square() * self.weights).mean() * float(self.factor)


EYE = torch.eye(6).bool() | torch.ones(6, 6).tril().bool()
ROWS = X(16)
SCRIPTS = {
    "a reduction": Script(Reduction, ((X(16), Y(16), "mean"), (X(16), Y(16), "sum"), (X(16), Y(16), "mean"))),
    "an ignored label": Script(Ignored, ((X(16), Y(16), 0), (X(16), Y(16), 1))),
    "an axis": Script(Axis, ((X(16), 1), (X(16), 0))),
    "a square mask of varying size": Script(
        Masked, ((seeded(4, 6), EYE), (seeded(4, 4), EYE[:4, :4].clone())), micros=2
    ),
    "as many classes as rows": Script(Classes, ((X(16), X(16)[:, 0], X(1)[0]), (X(8), X(8)[:, 0], X(1)[0]))),
    "a branch on the labels": Script(Shortcut, ((X(16), Y(16).sort()[0]), (X(16), Y(16) % 4), (X(16), Y(16, 1)))),
    "a branch on the rows": Script(Branch, (X(16),)),
    "a renormed embedding": Script(Renormed, (torch.arange(16) % 20,)),
    "a counter": Script(Counter, (ROWS,) * 3),
    "an attribute": Script(Annealed, (ROWS,) * 4, {1: setting(beta=0.7), 3: setting(beta=0.1)}),
    "a tensor replaced": Script(Weighted, (ROWS,) * 3, {1: setting(weights=torch.arange(float(WIDTH)))}),
    "a number read from a tensor": Script(Weighted, (ROWS,) * 3, {1: lambda model: model.factor.fill_(0.25)}),
    "an entry in a container": Script(Annealed, (ROWS,) * 2, {1: _scale}),
    "eval between steps": Script(Normed, (ROWS,) * 4, {1: nn.Module.eval, 3: nn.Module.train}, micros=1),
    "an option of a layer": Script(Normed, (ROWS,) * 3, {1: _drop_in_training}, micros=1),
    "a weight replaced": Script(Net, (ROWS,) * 2, {1: _replace_weight}),
    "a layer replaced": Script(Net, (ROWS,) * 2, {1: _replace_layer}),
    "a forward patched": Script(Net, (ROWS,) * 2, {1: _patch}),
    "a state assigned": Script(Net, (ROWS,) * 2, {1: _load}),
    "a hook": Script(Net, (ROWS,) * 2, {1: _hook}),
    "a global": Script(Global, (ROWS,) * 2, {1: _set_alpha}),
    "Python's random": Script(PythonRandom, (ROWS,), micros=1),
    "its own generator": Script(OwnRandom, (ROWS,), micros=1),
    "a divisor that depends on the length": Script(Length, (seeded(16, 6), seeded(16, 3))),
    "inference mode": Script(Inference, (ROWS,) * 2),
    "inference mode as decorator": Script(Decorated, (ROWS,) * 2),
    "unfrozen": Script(FirstFrozen, (ROWS,) * 3, {1: _unfreeze}),
    "frozen": Script(Net, (ROWS,) * 2, {1: lambda model: model.l[0].requires_grad_(False)}),
    "memory from None": Script(Memory, (ROWS,) * 3),
    "memories in a list": Script(Memories, (ROWS,) * 3),
    "backward in forward": Script(Backward, (ROWS,)),
    "no gradient": Script(NoGrad, (ROWS,)),
    "everything frozen": Script(Frozen, (ROWS,)),
    "a different order of keys": Script(
        Reduction,
        ({"x": X(16), "y": Y(16), "red": "mean"}, {"red": "mean", "y": Y(16), "x": X(16)}),
    ),
    "a smaller last batch": Script(Net, (X(16), X(3), X(16))),
    "a different dtype": Script(Classes, ((X(16), X(16)[:, 0], X(1)[0]), (X(16), X(16)[:, 0].double(), X(1)[0]))),
}
