"""Training of embeddings with sparse gradients and clipping, in two stages and in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

import autopart
from support.jobs.step_jobs import cluster

Found = tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Losses, norms before clipping, the last gradients (clipped, dense) and the state."""
WORDS, MAX_NORM = 30, 0.05


class Bag(nn.Module):
    """An embedding and an embedding bag. tied: the head shares the first embedding's weight across stages."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, 8, sparse=True, mode="mean")
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words).mean(1) + self.bag(words)
        return F.cross_entropy(self.head(self.layer(hidden).tanh()), target)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(WORDS, (5, 5), generator=generator) for _ in range(3)]
    return [(words[:, :4], words[:, 4].contiguous()) for words in made]


def optimizers(named: Iterable[tuple[str, nn.Parameter]], tied: bool) -> list[torch.optim.Optimizer]:
    """Return SGD for all parameters or, if nothing is tied, SparseAdam for those with sparse gradients."""
    named = list(named)
    if tied:
        return [torch.optim.SGD([p for _, p in named], lr=0.5)]
    sparse = [p for name, p in named if name.startswith(("words", "bag"))]
    others = [p for name, p in named if not name.startswith(("words", "bag"))]
    made = [torch.optim.SparseAdam(sparse, lr=0.1)] if sparse else []
    return made + ([torch.optim.SGD(others, lr=0.5)] if others else [])


def alone(tied: bool) -> Found:
    model = Bag(tied)
    steppers = optimizers(model.named_parameters(), tied)
    losses, norms = [], []
    for words, target in batches():
        model.zero_grad()
        loss = model(words, target)
        loss.backward()
        norms.append(torch.stack([dense(p.grad).norm() for p in model.parameters()]).norm().item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, MAX_NORM / (norms[-1] + 1e-6)))
        for stepper in steppers:
            stepper.step()
        losses.append(loss.item())
    return losses, norms, {n: dense(p.grad) for n, p in model.named_parameters()}, dict(model.state_dict())


def dense(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def piped(tied: bool) -> Found:
    options = {"micro_batches": 2, "stages": 2, "cuts": ("layer",), "costs": "analytic"}
    with autopart.compile(Bag(tied), cluster(), sample=batches()[0], **options) as pipe:
        steppers = optimizers(pipe.named_parameters(), tied)
        losses, norms = [], []
        for words, target in batches():
            for parameter in pipe.parameters():
                parameter.grad = None
            losses.append(pipe.step(words, target).item())
            norms.append(pipe.clip_grad_norm_(MAX_NORM).item())
            for stepper in steppers:
                stepper.step()
        gradients = {name: dense(gradient) for name, gradient in pipe.gradients().items()}
        return losses, norms, gradients, pipe.state_dict()
