"""Jobs that train a model while its layers freeze and the plan follows, and their oracle in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import autopart
from support.jobs.replan_jobs import state_by_name
from support.models.towers import FAMILIES, Family

ROWS, MICROS = 8, 2


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    frozen: layers that are frozen, by period; the plan follows at the beginning of each period but the first.  period:
    steps.  options: of `autopart.compile`.  dtype: of the weights.
    """

    family: str
    depth: int = 12
    frozen: tuple[int, ...] = (0, 3, 6, 9, 11)
    period: int = 8
    dropout: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    @property
    def steps(self) -> int:
        return self.period * len(self.frozen)

    def model(self) -> nn.Module:
        return self.kind.model(self.depth, self.dropout, self.dtype)

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        return self.kind.data(ROWS, step, self.dtype)


@dataclass
class Trained:
    """What a training left, on one rank: losses by step, gradients of the steps that `watched` yields, the state of the
    model, and of this rank's optimizer by parameter.  plans: the decisions that ran, in order.  backwards: that this
    rank ran in each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, Any] = field(default_factory=dict)
    plans: list[Any] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)


def watched(way: Way, step: int) -> bool:
    """Whether the gradients of a step are compared: the first and last ones of each period."""
    return step % way.period in (0, 1, way.period - 1)


def optimizer_of(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01, eps=1e-5)


def alone(way: Way) -> Trained:
    """Train the plain model in one process with the prefixes that a pipe's policy freezes: what is before a layer in
    the data flow, embeddings too."""
    model, found = way.model(), Trained()
    optimizer = optimizer_of(list(model.parameters()))
    for step in range(way.steps):
        freeze_by_hand(way, model, way.frozen[step // way.period])
        optimizer.zero_grad()
        parts = [[t[i::1] for t in way.batch(step)] for i in (0,)]
        if way.kind.coupled:
            size = ROWS // MICROS
            parts = [[t[i : i + size] for t in way.batch(step)] for i in range(0, ROWS, size)]
        losses = [model(*part) / len(parts) for part in parts]
        for loss in losses:
            loss.backward()
        note(found, way, step, sum(loss.item() for loss in losses), dict(model.named_parameters()))
        optimizer.step()
    found.state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found.moments = state_by_name(optimizer, dict(model.named_parameters()))
    return found


def note(found: Trained, way: Way, step: int, loss: float, named: Mapping[str, nn.Parameter]) -> None:
    found.losses.append(loss)
    if watched(way, step):
        found.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})


def freeze_by_hand(way: Way, model: Any, count: int) -> None:
    """Freeze the first layers as a user would, with the embeddings before them."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    layers = [*model.encoder, *model.decoder] if way.family == "t5" else list(model.layers)
    for layer in layers[:count]:
        layer.requires_grad_(False)
    if not count:
        return
    for name in ("patches", "words", "norm" if way.family == "bert" else "", "stem", "places"):
        module = getattr(model, name, None) if name else None
        if module is not None:
            module.requires_grad_(False)
    if way.family == "vit":
        model.token.requires_grad_(False)
    if way.family == "t5" and count > len(model.encoder):
        model.encoded.requires_grad_(False)


def run(way: Way, ranks: int, replan: bool = True) -> Trained:
    """Train in a pipe; the policy freezes, and the plan follows at each change."""
    policy = autopart.freeze.Policy(lambda epoch, norms: way.frozen[epoch])
    found = Trained()
    with compiled(way, ranks) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        for step in range(way.steps):
            if step % way.period == 0:
                changed = policy.apply(pipe, step // way.period)
                if changed and replan:
                    found.reasons.append(pipe.replan(optimizer, steps=10**8).reason)
                found.plans.append(pipe.plan.decision)
            pipe.zero_grad()
            with pipe.traced() as spans:
                found.losses.append(pipe.step(*way.batch(step)).item())
            found.backwards.append(sum(span.action.kind in "BI" for span in spans))
            if watched(way, step):
                found.gradients.append({n: g for n, g in pipe.gradients().items() if g is not None})
            found.scales.append(pipe.scaler.scale if pipe.scaler is not None else 1.0)
            optimizer.step()
        found.state = {k: v for k, v in pipe.state_dict().items() if isinstance(v, torch.Tensor)}
        found.moments = state_by_name(optimizer, dict(pipe.named_parameters()))
    return found


@contextmanager
def compiled(way: Way, ranks: int) -> Iterator[autopart.Pipe]:
    options = {"micro_batches": MICROS, "costs": "analytic", "cache": False, **way.options}
    with autopart.compile(way.model(), f"cpu:{ranks}", sample=way.batch(0), **options) as pipe:
        yield pipe
