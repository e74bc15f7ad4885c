"""Small models for random training scripts, composed of parts that read Python state in different ways.

Every part maps features to features of the same width, in double precision.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4
ALPHA = 0.5
CONFIG: dict[str, Any] = {"alpha": 0.5, "steps": [1.0, 2.0]}


class Settings:
    beta = 0.5


def helper() -> float:
    return ALPHA * 2


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()
        self.gain = 1.0

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return self.activation(self.linear(h)) * self.gain


class Twice(Dense):
    """A module called twice."""

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return h + super().forward(super().forward(h, mask), mask)


class Tied(Dense):
    """A part whose weight is tied to the head; see `Scripted`."""


class Norm(nn.Module):
    def __init__(self, running: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=running)

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return self.norm(h.transpose(1, -1)).transpose(1, -1) if h.dim() > 2 else self.norm(h)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.0)

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return h + self.drop(self.norm(h))


class Scaled(nn.Module):
    gamma = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.5
        self.flag = True
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        h = h * self.beta * self.gamma + self.weight
        return torch.tanh(h) if self.flag else torch.sin(h)


class Helper:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale


class Configured(nn.Module):
    """Reads containers and objects, one of which is shared by all such parts."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared
        self.config: Any = {"scale": [1.0, 2.0], "deep": {"er": {"act": "tanh"}}}
        self.helper = Helper(0.5)

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        h = self.helper.apply(h) * self.config["scale"][1] + sum(self.config["scale"]) * self.shared.alpha
        return getattr(torch, self.config["deep"]["er"]["act"])(h)


class Surrounded(nn.Module):
    """Reads globals, a class attribute and a closure variable."""

    def __init__(self) -> None:
        super().__init__()
        level = 0.5
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda h: h * level

    def factor(self) -> float:
        return 1.5

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return torch.tanh(self.scale(h) * ALPHA + CONFIG["alpha"] * Settings.beta * self.factor() + helper())


class Counting(nn.Module):
    """Keeps a counter and a running average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.decay = 0.5

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
            self.average.mul_(self.decay).add_(h.detach().reshape(-1, WIDTH).mean(0) * (1 - self.decay))
        return h * (1 + 0.01 * self.count) - self.average


class Optional(nn.Module):
    """Reads attributes that may not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("shift", None)
        self.register_buffer("table", torch.linspace(0.5, 1.0, WIDTH), persistent=False)

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        h = h * self.table
        if self.shift is not None:
            h = h + self.shift
        bonus = getattr(self, "bonus", None)
        return h if bonus is None else h + bonus


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dim = -1

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        if h.dim() < 3:
            return h * self.query(h).softmax(self.dim)
        scores = self.query(h) @ h.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return h + scores.softmax(self.dim) @ h


class Several(nn.Module):
    """A list of modules beside a list of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.weights = [0.5, 0.25]

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return sum(torch.tanh(part(h)) * weight for part, weight in zip(self.parts, self.weights, strict=False)) + h


class Plainly(nn.Module):
    """Reads tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.linspace(0.5, 1.0, WIDTH, dtype=torch.double)
        self.seen = torch.tensor([True, True, False, True])

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return torch.tanh(h * self.plain).masked_fill(~self.seen, 0.25)


class Extra(Dense):
    """Has extra state of several kinds, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = {"gain": 0.5, "amax": torch.ones(2, dtype=torch.double), "names": ["a", "b"]}

    def forward(self, h: torch.Tensor, mask: Any) -> torch.Tensor:
        return super().forward(h, mask) * self.kept["gain"]

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def _halved(module: Any, state: Any, prefix: str, *_: Any) -> None:
    weight = state.pop(f"{prefix}weight").clone()
    state.update(zip([f"{prefix}query", f"{prefix}key"], weight.chunk(2), strict=True))


def _whole(module: Any, state: Any, prefix: str, *_: Any) -> None:
    if f"{prefix}query" in state:
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}{part}") for part in ("query", "key")])


def _renamed(module: Any, state: Any, prefix: str, *_: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def _named(module: Any, state: Any, prefix: str, *_: Any) -> None:
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


class Hooked(Dense):
    """Saves its weight as two tensors, or under another name."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.linear._register_state_dict_hook(_halved if halves else _renamed)
        self.linear.register_load_state_dict_pre_hook(_whole if halves else _named)


PARTS = (
    "dense", "dense", "twice", "tied", "norm", "norm alone", "layered", "scaled", "configured", "surrounded",
    "counting", "optional", "attention", "several", "plainly", "extra", "halves", "renamed",
)  # fmt: skip
COUPLED = ("norm", "norm alone", "counting")
"""Parts that couple the rows of a batch: the reference must run the same micro-batches."""


class Scripted(nn.Module):
    """A sequence of parts, a head and a loss.

    kind: "rows" (features) or "tokens" (ids); loss: "class", "square" or "token".
    """

    def __init__(self, parts: Sequence[str], kind: str, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.loss = kind, loss
        self.temperature = 1.0
        self.shared = types.SimpleNamespace(alpha=0.25)
        if kind == "tokens":
            self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.parts = nn.ModuleList([self._part(name) for name in parts])
        self.head = nn.Linear(WIDTH, WIDTH)
        for part in self.parts:
            if isinstance(part, Tied):
                part.linear.weight = self.head.weight
        self.double()

    def freeze(self, count: int) -> None:
        """Freeze what comes before part `count`, and train everything else."""
        self.requires_grad_(True)
        for part in self.parts[:count]:
            part.requires_grad_(False)
        if count and self.kind == "tokens":
            self.embedding.requires_grad_(False)

    def _part(self, name: str) -> nn.Module:
        makers: dict[str, Callable[[], nn.Module]] = {
            "dense": Dense, "twice": Twice, "tied": Tied, "norm": lambda: Norm(True), "norm alone": lambda: Norm(False),
            "layered": Layered, "scaled": Scaled, "configured": lambda: Configured(self.shared),
            "surrounded": Surrounded, "counting": Counting, "optional": Optional, "attention": Attention,
            "several": Several, "plainly": Plainly, "extra": Extra, "halves": lambda: Hooked(True),
            "renamed": lambda: Hooked(False),
        }  # fmt: skip
        return makers[name]()

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: Any = None,
        red: str = "mean",
        ignore: int = -100,
        scale: Any = None,
        note: Any = None,
        tag: Any = None,
    ) -> dict[str, torch.Tensor]:
        """note: is not read. tag: a text or a number that is."""
        h = self.embedding(x) if self.kind == "tokens" else x.double()
        for part in self.parts:
            h = part(h, mask)
        h = self.head(h) / self.temperature
        if scale is not None:
            h = h * scale
        if tag is not None:
            h = h * (1.0 if tag in (3, "a3") else 0.5)
        return {"loss": self.loss_of(h, y, red, ignore), "out": h}

    def loss_of(self, h: torch.Tensor, y: torch.Tensor, red: str, ignore: int) -> torch.Tensor:
        if self.loss == "square":
            return h.square().mean() if red == "mean" else h.square().sum()
        if self.loss == "class":
            return F.cross_entropy(h.flatten(0, -2), y.flatten(), reduction=red, ignore_index=ignore)
        each = F.cross_entropy(h.flatten(0, -2), y.flatten(), reduction="none") * (y.flatten() != ignore)
        return each.sum() / (y != ignore).sum() if red == "mean" else each.sum()


def batch(kind: str, rows: int, length: int, seed: int, **more: Any) -> dict[str, Any]:
    """Return a batch.

    more: mask (bool), narrow (features in single precision), turned (reversed order of keys), and Python arguments of
    forward().
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length) if kind == "tokens" else (rows,)
    x = torch.randint(WIDTH, shape, generator=generator)
    if kind == "rows":
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.double)
        x = x.float() if more.get("narrow") else x
    made: dict[str, Any] = {"x": x, "y": torch.randint(WIDTH, shape, generator=generator)}
    made |= {name: more[name] for name in ("red", "ignore", "scale", "note", "tag") if name in more}
    if more.get("mask") and kind == "tokens":
        made["mask"] = torch.ones(length, length).tril().bool()
    return dict(reversed(made.items())) if more.get("turned") else made


def shares(model: Scripted, batches: Sequence[dict[str, Any]]) -> list[float]:
    """Return the weight of each micro-batch's loss in the loss of the batch."""
    if batches[0].get("red", "mean") == "sum":
        return [1.0] * len(batches)
    ignore = batches[0].get("ignore", -100)
    counts = [float(len(b["x"]) if model.loss == "square" else (b["y"] != ignore).sum()) for b in batches]
    return [count / sum(counts) if sum(counts) else 1 / len(counts) for count in counts]


def reset() -> None:
    """Restore the globals and classes that all models share."""
    global ALPHA
    ALPHA = 0.5
    CONFIG.update(alpha=0.5, steps=[1.0, 2.0])
    Settings.beta = 0.5
    Scaled.gamma = 0.5
    Surrounded.factor = _factor  # type: ignore[method-assign]
    Dense.forward = _forward  # type: ignore[method-assign]
    globals()["helper"] = _helper


_factor, _forward, _helper = Surrounded.factor, Dense.forward, helper
