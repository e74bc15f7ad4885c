"""Models whose program differs from batch to batch: on a single row, by task, by modality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, Any]


class Squeezed(nn.Module):
    """A regression head as those of transformers: on one row squeeze() drops the axis of rows too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(self.body(x).tanh()).squeeze(), labels.squeeze())


class Masked(nn.Module):
    """Attention of torch under key_padding_mask, which expands the mask on several rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        h = h + self.body(h, h, h, key_padding_mask=ids == 0, need_weights=False)[0]
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Branching(nn.Module):
    """Python that asks for the number of rows, and a loss that counts labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.body(x).relu()
        if x.shape[0] == 1:
            h = self.extra(h) * 2
        return F.cross_entropy(self.head(self.extra(h)), labels, ignore_index=4)


def _squeezed(rows: int) -> Batch:
    return {"x": torch.randn(rows, 4), "labels": torch.randn(rows, 1)}


def _masked(rows: int) -> Batch:
    ids = torch.randint(1, 20, (rows, 4))
    ids[:, 3] = 0
    return {"ids": ids, "labels": torch.randint(20, (rows, 4))}


def _branching(rows: int) -> Batch:
    labels = torch.randint(5, (rows,))
    labels[0] = 0
    return {"x": torch.randn(rows, 4), "labels": labels}


ONE_ROW: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "squeezed": (Squeezed, _squeezed),
    "masked": (Masked, _masked),
    "branching": (Branching, _branching),
}
"""Models that run another program on a single row, with what makes their batches."""


class ManyTasks(nn.Module):
    """Two modalities, of which either may be missing, a layer that is used twice, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.vision = nn.Embedding(11, 8), nn.Linear(6, 8)
        self.shared = nn.Linear(8, 8)
        self.trunk = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.first = nn.Linear(8, 3)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 4)})
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.word.weight
        self.never = nn.Parameter(torch.ones(3))

    def forward(
        self, task: str, labels: torch.Tensor, ids: torch.Tensor | None = None, image: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts = [self.word(ids).mean(1)] if ids is not None else []
        parts += [self.vision(image)] if image is not None else []
        h = sum(parts[1:], parts[0])
        for layer in self.trunk:
            h = torch.tanh(layer(h) + self.shared(h))
        if task == "a":
            return F.mse_loss(self.heads["a"](h).squeeze(1), labels.float())
        head = {"b": self.heads["b"], "first": self.first, "tied": self.tied}[task]
        out = head(h)
        return F.cross_entropy(out, labels % out.shape[1])


def task_batch(task: str, modes: str, rows: int) -> Batch:
    """Return a batch of a task ("a", "b", "first", "tied").  modes: "t" for text, "v" for images, or both."""
    batch: Batch = {"task": task, "labels": torch.randint(11, (rows,))}
    if "t" in modes:
        batch["ids"] = torch.randint(11, (rows, 5))
    if "v" in modes:
        batch["image"] = torch.randn(rows, 6)
    return batch
