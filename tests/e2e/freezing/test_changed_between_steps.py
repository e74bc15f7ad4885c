"""Whatever a model reads may change between two steps: each step is that of plain torch, or is refused by name.

Drawn are what changes and when, which layers are frozen, whether their activations are kept, micro-batches, a scale of
the loss, evaluations in between, kinds of batches and compiled stages."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.extras.freezing import replan as replanning
from autopart.extras.freezing.kept.activations import activations_of
from autopart.ir.errors import RefusedError

WIDTH, TOKENS, ROWS, SAMPLES = 4, 3, 4, 8
NUMBER = 1.0
TABLE = {"factor": [1.0]}


class Config:
    """A config object."""

    def __init__(self) -> None:
        self.gain, self.inner = 1.0, {"list": [1.0, 1.0]}


def shifting(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reads its closure."""
    return lambda x: x + by


class Layer(nn.Module):
    """Attention and a product that read Python of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.alpha, self.config, self.shift = 1.0, Config(), shifting(0.1)
        self.plain = torch.ones(WIDTH, dtype=torch.float64)
        self.seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        self.register_buffer("scale", torch.linspace(0.5, 1, WIDTH))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        own = keep.clone()
        mask = own[:, None, :].expand(-1, TOKENS, -1)
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        own[:, 1:] &= self.seen[0, 1:] if self.config.inner["list"][0] == 1 else self.seen[2, 1:]
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=self.seen)
        factor = self.alpha * self.config.gain * NUMBER * TABLE["factor"][0] * (1.5 if self.training else 1.0)
        return x + self.mixed(self.shift(self.linear(self.norm(x)))) * factor * self.scale * self.plain


class Net(nn.Module):
    """Some layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: torch.Tensor, keep: torch.Tensor, kind: str = "mean") -> torch.Tensor:
        """Return the loss of a batch."""
        for layer in self.layers:
            x = layer(x, keep)
        found = self.head(x).square()
        return found.mean() if kind == "mean" else found.sum(-1).mean()


def replaced(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


def number(home: Any, name: str) -> None:
    setattr(home, name, getattr(home, name) * 1.5)


def listed(layer: Layer) -> None:
    layer.config.inner["list"][0] += 1


def written(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.25)


def flipped(layer: Layer) -> None:
    layer.seen[0, 1] = ~layer.seen[0, 1]


def behind(tensor: torch.Tensor) -> None:
    tensor.data.mul_(1.25)


def elsewhere(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 1.25


OWN: dict[str, Callable[[Layer], object]] = {
    "attribute": lambda layer: number(layer, "alpha"),
    "config object": lambda layer: number(layer.config, "gain"),
    "another config object": lambda layer: setattr(layer, "config", Config()),
    "list in a config": listed,
    "closure": lambda layer: setattr(layer, "shift", shifting(random.Random(int(layer.alpha * 100)).random())),
    "flag": lambda layer: layer.train(not layer.training),
    "method": lambda layer: setattr(layer, "mixed", replaced.__get__(layer)),
    "plain tensor": lambda layer: written(layer.plain),
    "another plain tensor": lambda layer: setattr(layer, "plain", layer.plain * 1.5),
    "plain tensor by .data": lambda layer: behind(layer.plain),
    "mask": flipped,
    "another mask": lambda layer: setattr(layer, "seen", torch.ones_like(layer.seen)),
    "buffer": lambda layer: written(layer.scale),
    "buffer by .data": lambda layer: behind(layer.scale),
    "weight": lambda layer: written(layer.linear.weight),
    "weight by .data": lambda layer: behind(layer.linear.weight),
    "other memory by .data": lambda layer: elsewhere(layer.norm.weight),
    "loaded": lambda layer: layer.linear.load_state_dict({k: v * 0.9 for k, v in layer.linear.state_dict().items()}),
}
"""Changes of a layer."""


def global_number() -> None:
    global NUMBER
    NUMBER *= 1.25


def global_table() -> None:
    TABLE["factor"][0] *= 1.25


SHARED = {"global": global_number, "table of a global": global_table}
UNSEEN = "one entry by numpy"


@dataclass(frozen=True)
class Case:
    """frozen: layers.  kept: whether their activations are.  changes: before each step."""

    frozen: int
    kept: bool
    micro_batches: int
    scale: float
    kinds: bool
    evaluates: bool
    changes: list[list[tuple[str, int]]]


def drawn(seed: int, epochs: int) -> Case:
    draw = random.Random(seed)
    steps, kinds = epochs * SAMPLES // ROWS, draw.random() < 0.3
    changes: list[list[tuple[str, int]]] = [[] for _ in range(steps)]
    for step in range(1, steps):
        if draw.random() < 0.6:
            changes[step].append((draw.choice((*OWN, *SHARED)), draw.randrange(2)))
        elif step % (SAMPLES // ROWS) == 0 and not kinds and draw.random() < 0.5:
            changes[step].append((UNSEEN, draw.randrange(2)))
    return Case(
        draw.randrange(3), draw.random() < 0.75, draw.choice((1, 2)), draw.choice((1.0, 1.0, 8.0)), kinds,
        draw.random() < 0.4, changes,
    )  # fmt: skip


def change(models: tuple[Net, Net], name: str, place: int) -> None:
    if name in SHARED:
        SHARED[name]()
        return
    for model in models:
        layer = model.layers[place]
        assert isinstance(layer, Layer)
        if name == UNSEEN:
            layer.linear.weight.detach().numpy()[0, 0] += 1.0
        else:
            OWN[name](layer)


def trained(model: Net) -> None:
    """Step the parameters that learn."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


@contextmanager
def kept(model: Net, device: str, **options: Any) -> Iterator[autopart.Pipe]:
    """Yield a pipe whose plan begins behind the frozen layers, if there are some."""
    with pytest.MonkeyPatch.context() as patch, autopart.compile(model, device, **options) as pipe:
        patch.setattr(replanning, "_pays", lambda *_: True)
        patch.setattr(replanning, "WORTH", -1e9)
        pipe.replan(cache=autopart.freeze.AutoCache(1 << 20, samples=SAMPLES))
        yield pipe


def check(seed: int, epochs: int = 5, **options: Any) -> None:
    """Train with the changes of a case, beside plain torch."""
    global NUMBER
    NUMBER, TABLE["factor"][0] = 1.0, 1.0
    case = drawn(seed, epochs)
    model = Net()
    model.layers[: case.frozen].requires_grad_(False)
    plain = copy.deepcopy(model)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    keep = torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    keep[SAMPLES // 2 :, 2] = seed % 2 == 0
    common = {"costs": "analytic", "cache": False, "micro_batches": case.micro_batches} | options
    sample = {"x": x[:ROWS], "keep": keep[:ROWS]}
    begun = kept if case.kept else autopart.compile
    with begun(model, "cpu:1", sample=sample, **common) as pipe:
        for step, changes in enumerate(case.changes):
            for name, place in changes:
                change((model, plain), name, place)
            rows = slice(ROWS * (step % 2), ROWS * (step % 2) + ROWS)
            batch = {"x": x[rows], "keep": keep[rows]} | ({"kind": "sum"} if case.kinds and step % 3 == 0 else {})
            where = f"seed {seed}, step {step}: {changes} of {case}"
            names = {"samples": range(SAMPLES)[rows]} if case.kept else {}
            unseen = [any(name == UNSEEN for name, _ in each) for each in case.changes[max(step - 1, 0) : step + 1]]
            if case.evaluates:
                flags = [module.training for module in plain.modules()]
                plain.eval()
                torch.testing.assert_close(pipe.eval_loss(batch), plain(**batch).detach(), msg=where)
                for module, flag in zip(plain.modules(), flags, strict=True):
                    module.training = flag
            loss = plain(**batch)
            loss.backward()
            try:
                found = pipe.step(batch, scale=case.scale, **names)
            except RefusedError as error:
                assert any(unseen), where
                assert "linear.weight of a frozen layer was written to unnoticed" in str(error)
                found = pipe.step(batch, scale=case.scale, **names)  # as it says, the next step is exact
            # the last step of a pass may use the earlier values: both models go on with its gradients
            stale = case.kept and unseen[-1] and not torch.allclose(found, loss.detach(), rtol=1e-9, atol=1e-11)
            if not stale:
                torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-11, msg=where)
            for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
                if own.grad is not None:
                    assert mine.grad is not None
                    mine.grad /= case.scale
                    if stale:
                        own.grad.copy_(mine.grad)
                    torch.testing.assert_close(mine.grad, own.grad, rtol=1e-8, atol=1e-10, msg=where)
            trained(model)
            trained(plain)


@pytest.mark.parametrize(("seed", "epochs"), [(205, 3), (0, 5)])  # of 0: kinds of batches that no step reads any more
def test_each_step_is_that_of_plain_torch(seed: int, epochs: int) -> None:
    check(seed, epochs)


def test_a_write_in_the_middle_of_a_pass_that_cannot_be_seen_is_refused_before_the_next_one() -> None:
    model, rows = Net(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    model.layers[0].requires_grad_(False)
    plain, keep = copy.deepcopy(model), torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    parts = [slice(0, ROWS), slice(ROWS, SAMPLES)]
    with kept(model, "cpu:1", sample={"x": rows[:ROWS], "keep": keep[:ROWS]}, costs="analytic", cache=False) as pipe:

        def step(part: slice) -> torch.Tensor:
            return pipe.step({"x": rows[part], "keep": keep[part]}, samples=range(SAMPLES)[part])

        for part in parts:
            step(part)
        read = step(parts[0])  # all numbers were looked at before
        change((model, plain), UNSEEN, 0)
        stale = step(parts[1])
        with pytest.raises(RefusedError, match=r"layers.0.linear.weight of a frozen layer was written to unnoticed"):
            step(parts[0])
        exact = [plain(rows[part], keep[part]).detach() for part in parts]
        assert not torch.allclose(read, exact[0]) and not torch.allclose(stale, exact[1])
        for part, loss in zip(parts, exact, strict=True):
            torch.testing.assert_close(step(part), loss)
        assert activations_of(pipe.session).counts.read == 2 * ROWS
        with torch.no_grad():  # what the message says
            for each in (model, plain):
                each.layers[0].linear.weight[0, 0] += 1.0
        for part in parts:
            torch.testing.assert_close(step(part), plain(rows[part], keep[part]).detach())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_each_of_many_steps_is_that_of_plain_torch(first: int) -> None:
    for seed in (*range(first, first + 10), *((102,) if not first else ())):
        check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while its compiler is imported
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_each_compiled_step_is_that_of_plain_torch(seed: int) -> None:
    check(seed, backend="inductor")
