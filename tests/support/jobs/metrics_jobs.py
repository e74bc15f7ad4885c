"""Runs on every rank: the metrics of steps, and a pipe's report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from autopart.extras.metrics.metrics import Metrics

ROWS, TOKENS, VOCABULARY, WIDTH = 8, 6, 32, 16


class Sentences(nn.Module):
    """A network over tokens whose work is known: two products of each token with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.middle(self.table(ids)).tanh())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


FLOPS = 3 * 2 * ROWS * TOKENS * (WIDTH * 4 * WIDTH + 4 * WIDTH * VOCABULARY)
"""Of a step: forward and twice as much backward, a multiplication and an addition for each weight and token."""


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=source)
    return {"ids": ids, "labels": ids}


def measured(folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train some steps, and return the metrics of each, with what they should be."""
    torch.set_num_threads(1)
    given = {"costs": "analytic", "micro_batches": 4, "stages": 2, **options}
    found: dict[str, Any] = {"metrics": [], "losses": [], "norms": []}
    with autopart.compile(Sentences(), "cpu:2", sample=batch(), **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for number in range(4):
            found["losses"].append(pipe.step(batch()).item())
            if number == 1:
                found["norms"].append(float(pipe.clip_grad_norm_(0.01)))
            elif number < 3:
                grads = [grad for grad in pipe.gradients().values() if grad is not None]
                found["norms"].append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))
            else:
                found["norms"].append(None)
                pipe.zero_grad()
            found["metrics"].append(pipe.metrics())
            optimizer.step()
            pipe.zero_grad()
        found["spans after"] = pipe.session.spans
        found["plan"] = pipe.plan
        found["devices"] = pipe.cluster.devices
        pipe.step(batch(ROWS // 2))
        found["other"] = pipe.metrics()
        if folder is not None:
            pipe.timeline(batch())
            found["report"] = pipe.report(folder / "run.html")
            found["fragment"] = pipe._repr_html_()
    return found


def logged(folder: Path) -> list[Metrics | None]:
    """Write a log of five steps, a line for every second one, and return what it returned."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    found = []
    with (
        autopart.compile(Sentences(), "cpu:2", sample=batch(), **options) as pipe,
        autopart.MetricsLog(folder / "run.jsonl", every=2, tensorboard=False) as log,
    ):
        for number in range(5):
            pipe.step(batch())
            found.append(log.add(pipe, lr=0.5 * number, note="warm-up"))
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return what a log wrote."""
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
