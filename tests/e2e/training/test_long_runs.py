"""Thirty steps in which processes end after ten: the same plan gives the same bits, another plan the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.zoo import CASES, SEQ, VOCAB

import autopart

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


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BOTH = {"stages": 2, "replicas": 2, "micro_batches": 2, "zero": 1, "precision": "fp16"}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer stages": ("cpu:4", {"stages": 1, "replicas": 4, "micro_batches": 2, "zero": 1, "precision": "fp16"}),
    "more stages": ("cpu:4", {"stages": 4, "micro_batches": 4, "precision": "fp16"}),
    "fewer ranks": ("cpu:2", {"stages": 2, "micro_batches": 2, "precision": "fp16"}),
    "one rank": ("cpu:1", {"stages": 1, "micro_batches": 1, "precision": "fp16"}),
    "slices": ("cpu:2", {"stages": 2, "micro_batches": 2, "token_slices": 2, "precision": "fp16"}),
}


def test_new_processes_go_on_to_the_bit_under_the_same_plan_and_in_rounding_under_others(tmp_path: Path) -> None:
    folder, whole = str(tmp_path), range(4)
    wanted = autopart.launch(run, "cpu:4", folder, BOTH, "cpu:4", 0, STEPS, timeout=200)
    again = autopart.launch(run, "cpu:4", folder, BOTH, "cpu:4", SAVED, STEPS, timeout=200)
    for rank in whole:
        assert again[rank][0] == wanted[rank][0][SAVED:]
        assert again[rank][1].keys() == wanted[rank][1].keys()
        assert all(torch.equal(again[rank][1][name], value) for name, value in wanted[rank][1].items())
    state = {name: value for _, part in wanted for name, value in part.items()}
    for name, (cluster, options) in OTHERS.items():
        found = autopart.launch(run, cluster, folder, options, cluster, SAVED, STEPS, timeout=200)
        torch.testing.assert_close(found[0][0], wanted[0][0][SAVED:], rtol=2e-3, atol=0, msg=name)
        other = {each: value for _, part in found for each, value in part.items()}
        assert other.keys() == state.keys(), name
