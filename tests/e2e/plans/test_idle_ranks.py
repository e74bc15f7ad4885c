"""Ranks without trainable parameters: every usual way to build an optimizer works, as in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart

DEPTH, WIDTH, ROWS = 4, 6, 8
MOVING = {"lr": 0.05}


class Tower(nn.Module):
    """Some layers, of which a draw trains a few."""

    def __init__(self, trained: set[int], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.to(dtype)
        train(self, trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(model: Any, trained: set[int]) -> None:
    for number, layer in enumerate(model.layers):
        layer.requires_grad_(number in trained)


def _decayed(of: Any) -> Any:
    named = [(name, p) for name, p in of.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ],
        **MOVING,
    )


def _by_layer(of: Any) -> Any:
    groups = [
        {"params": [p for name, p in of.named_parameters() if f"layers.{number}." in name], "lr": 0.02 * (number + 1)}
        for number in range(DEPTH)
    ]
    return torch.optim.AdamW(groups)


def _by_names(of: Any) -> Any:
    decayed = {f"layers.{number}.weight" for number in range(DEPTH)}
    named = [(name, p) for name, p in of.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if name in decayed], "weight_decay": 0.1},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ],
        **MOVING,
    )


def _of_dict(of: Any) -> Any:
    params = {name: p for name, p in of.named_parameters() if p.requires_grad}
    return torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)


BUILDERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "list": lambda of: torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], **MOVING),
    "filter": lambda of: torch.optim.AdamW(filter(lambda p: p.requires_grad, of.parameters()), **MOVING),
    "named": lambda of: torch.optim.AdamW([(n, p) for n, p in of.named_parameters() if p.requires_grad], **MOVING),
    "foreach": lambda of: torch.optim.Adam([p for p in of.parameters() if p.requires_grad], foreach=True, **MOVING),
    "all": lambda of: torch.optim.AdamW(of.parameters(), **MOVING),
    "decayed": _decayed,
    "layers": _by_layer,
    "names": _by_names,
    "dict": _of_dict,
}


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(step))


def drawn(seed: int) -> dict[str, Any]:
    """Return a run: what is trained at first and later, how the optimizer is built, and two plans."""
    draw = random.Random(seed)
    first = set(draw.sample(range(DEPTH), draw.randint(1, 2)))
    masters = draw.random() < 0.3
    plans = [
        {"stages": 2, "replicas": 1, "cuts": [f"layers.{draw.randint(1, 3)}"], "micro_batches": 2},
        {"stages": 1, "replicas": 2, "zero": draw.randint(0, 1), "micro_batches": 2},
    ]
    return {
        "first": first,
        "later": set(draw.sample(sorted(first), draw.randint(1, len(first)))),
        "builder": draw.choice(sorted(BUILDERS)),
        "masters": masters,
        "plans": draw.sample(plans, 2) if draw.random() < 0.7 else [plans[0], plans[0]],
    }


def _stepped(of: Any, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = of.step(batch(step, dtype)) if isinstance(of, autopart.Pipe) else of(batch(step, dtype))
        if not isinstance(of, autopart.Pipe):
            loss.backward()
        optimizer.step()


def alone(seed: int) -> dict[str, torch.Tensor]:
    """Train in one process."""
    run = drawn(seed)
    model = Tower(run["first"], torch.float64)
    optimizer = BUILDERS[run["builder"]](model)
    _stepped(model, optimizer, range(2), torch.float64)
    train(model, run["later"])
    optimizer.zero_grad()
    _stepped(model, optimizer, range(2, 6), torch.float64)
    return dict(model.state_dict())


def divided(seed: int, folder: str) -> tuple[dict[str, torch.Tensor], int]:
    """Train on two ranks: under one plan, then with fewer layers under another, then from a checkpoint.  Returns the
    state, and how often this rank had nothing to train."""
    run, idle = drawn(seed), 0
    dtype = torch.bfloat16 if run["masters"] else torch.float64
    place = Path(folder) / str(seed)
    options = {"sample": batch(0, dtype), "costs": "analytic", "cache": False, "master_weights": run["masters"]}
    plans = [autopart.plan(Tower(run["first"], dtype), "cpu:2", **{**options, **plan}) for plan in run["plans"]]
    model = Tower(run["first"], dtype)
    with autopart.compile(model, "cpu:2", plan=plans[0], **options) as pipe:
        optimizer = BUILDERS[run["builder"]](pipe)
        idle += not any(p.requires_grad and p.numel() for p in pipe.parameters())
        _stepped(pipe, optimizer, range(2), dtype)
        pipe.adopt(plans[1], optimizer)
        train(model, run["later"])
        optimizer.zero_grad()
        idle += not any(p.requires_grad and p.numel() for p in pipe.parameters())
        _stepped(pipe, optimizer, range(2, 4), dtype)
        pipe.save(place, optimizer)
    model = Tower(run["first"], dtype)
    with autopart.compile(model, "cpu:2", plan=plans[0], **options) as pipe:
        optimizer = BUILDERS[run["builder"]](pipe)
        pipe.load(place, optimizer)
        train(model, run["later"])
        _stepped(pipe, optimizer, range(4, 6), dtype)
        return dict(pipe.state_dict()), idle


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("seeds", [(8, 11), pytest.param(range(80), marks=pytest.mark.slow)], ids=["few", "many"])
def test_an_optimizer_is_built_as_usual_where_a_rank_has_frozen_layers_alone(
    pair: Any, tmp_path: Any, seeds: Sequence[int]
) -> None:
    idle, start = 0, Tower(set(), torch.float64).state_dict()
    for seed in seeds:
        run, expected = drawn(seed), alone(seed)
        for state, without in pair.run(divided, seed, str(tmp_path)):
            idle += without
            for name, value in expected.items():
                if run["masters"]:  # gradients in half precision: what moved, and what did not
                    change, own = value - start[name], state[name].double() - start[name]
                    assert bool(change.abs().max() > 0.01) == bool(own.abs().max() > 0.01), (name, run)
                else:
                    assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (name, run)
    assert idle >= len(seeds) // 2  # the draws reach what is tested
