"""Training over a DataLoader with workers, under changing plans; returns which samples the steps have used."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import autopart
from autopart.files.checkpoints.folders import latest
from support.jobs.state.checkpoint_jobs import model

SIZE, ROWS = 24, 8
Seen = list[tuple[int, int]]
"""(epoch, sample) in the order of the steps."""


def dataset() -> TensorDataset:
    """Return samples that begin with their own number."""
    numbers = torch.arange(SIZE)
    return TensorDataset(torch.stack([numbers, (numbers * 7) % 24, (numbers * 5) % 24], 1), numbers)


def part(
    folder: str, options: dict[str, Any], cluster: str, readers: int, steps: int, adopts: dict[str, Any] | None = None
) -> Seen:
    """Load what is there, run some steps, adopt another plan after the first of them if one is given, and save.

    readers: processes of the DataLoader on each rank, 0 to read in the rank itself."""
    ids, labels = dataset()[:ROWS]
    sample, seen = {"ids": ids, "labels": labels}, Seen()
    with autopart.compile(model(0), cluster, sample=sample, costs="analytic", **options) as pipe:
        if latest(folder):
            pipe.load(folder)
        sampler = pipe.sampler(dataset(), rows=ROWS, seed=3)
        while len(seen) == 0 or (steps > 0 and sampler.epoch < 3):
            for ids, labels in DataLoader(dataset(), batch_sampler=sampler, num_workers=readers):
                seen += [(sampler.epoch, int(number)) for number in labels]
                pipe.step({"ids": ids, "labels": labels})
                steps -= 1
                if adopts is not None:
                    pipe.adopt(autopart.plan(model(0), cluster, sample=sample, costs="analytic", **adopts))
                    adopts = None
                if steps == 0:
                    break
        pipe.save(folder)
    return seen
