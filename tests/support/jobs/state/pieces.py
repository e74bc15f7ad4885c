"""A transformer by hand, trained with pieces of tensors on four ranks, and in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import autopart
from support.models.tokens.by_hand import Gpt
from support.oracles import fake_nccl  # noqa: F401  registers the transport

EXACT = 1e-10
BESIDE = {"tensor_parallel": 2, "stages": 1, "replicas": 2}
"""Two replicas of a group of two ranks, on four."""
SHARED = {**BESIDE, "zero": 1}
HALF = {"dtype": torch.bfloat16, "master_weights": True}


def gpt(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(dropout=dropout).to(dtype)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 24, (8, 8), generator=made)
    labels = ids.roll(-1, 1)
    labels[:3, 2:] = -1
    return ids, labels


def compiled(world: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0, **given: Any) -> autopart.Pipe:
    torch.set_num_threads(1)
    options = {"costs": "analytic", "sample": batch(0), **({} if "plan" in given else {"micro_batches": 2}), **given}
    return autopart.compile(gpt(dtype, dropout), f"cpu:{world}", **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if t.dim())


def masters_of(pipe: autopart.Pipe) -> dict[str, torch.Tensor]:
    return dict(pipe.state_dict()._metadata["autopart"].get("masters", {}))  # type: ignore[attr-defined]


def alone(seeds: Iterable[int]) -> tuple[list[float], nn.Module]:
    """Train a step for each seed in one process, in double precision; return losses and the model."""
    model, losses = gpt(), []
    optimizer = adamw(model.parameters())
    for seed in seeds:
        loss = model(*batch(seed))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model
