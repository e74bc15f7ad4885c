"""A GPT-2 with dropout and tied weights, trained for 30 steps in fp16 with groups, a schedule and a loss scale."""

from __future__ import annotations

from typing import Any

import torch

import autopart
from support.models.zoo import CASES, SEQ, VOCAB

STEPS, SAVED = 30, 10


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return 8 sequences of a step."""
    ids = torch.randint(VOCAB, (8, SEQ), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def run(
    folder: str, options: dict[str, Any], cluster: str, first: int, last: int
) -> tuple[list[float], dict[str, Any]]:
    """Train from step `first`, loaded from the folder unless 0, to `last`, and save at step 10.

    Returns the losses, and by name: the whole state of the model, the optimizer state of this rank, the learning rates
    and the loss scale."""
    torch.manual_seed(1 if first else 0)  # what is loaded replaces these weights
    losses = []
    with autopart.compile(CASES["gpt2"].make(0.1), cluster, sample=batch(0), costs="analytic", **options) as pipe:
        named = list(pipe.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        if first:
            assert pipe.load(folder, optimizer, scheduler) == "at ten" and pipe.steps == first
        for step in range(first, last):
            optimizer.zero_grad()
            losses.append(float(pipe.step(batch(step))))
            if not pipe.skipped:
                optimizer.step()
            scheduler.step()
            if not first and step + 1 == SAVED:
                pipe.save(folder, optimizer, scheduler, "at ten")
        state: dict[str, Any] = dict(pipe.state_dict())
        for name, parameter in pipe.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{key}/{name}"] = value.detach().clone()
        scale = pipe.scaler.get_scale() if pipe.scaler is not None else 0.0
        return losses, state | {"lr": torch.tensor(scheduler.get_last_lr()), "scale": torch.tensor(scale)}
