"""Models of five families whose layers freeze 0, 3, 6, ..., planned anew at each change, against plain training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.jobs.replan_jobs import state_by_name
from support.models.towers import FAMILIES, Family
from support.workers import Workers
from torch import nn

import autopart

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


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(900)

PIPELINE: dict[str, Any] = {"stages": 2, "replicas": 1}
REPLICAS: dict[str, Any] = {"stages": 2, "replicas": 2, "zero": 1}


def same(found: Sequence[Trained], expected: Trained, rtol: float = 1e-10, atol: float = 1e-11) -> None:
    """Compare every rank with the oracle: losses and gradients by step, weights and Adam moments at the end."""
    moments: dict[str, Any] = {}
    for own in found:
        assert own.losses == pytest.approx(expected.losses, rel=max(rtol, 1e-11))
        for mine, reference in zip(own.gradients, expected.gradients, strict=True):
            assert mine.keys() == reference.keys()
            for name, gradient in reference.items():
                torch.testing.assert_close(mine[name], gradient, rtol=rtol, atol=atol)
        for name, tensor in expected.state.items():
            torch.testing.assert_close(own.state[name], tensor, rtol=rtol, atol=atol)
        moments |= own.moments
    assert moments.keys() == expected.moments.keys()
    for name, value in expected.moments.items():
        torch.testing.assert_close(moments[name], value, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_a_language_model_with_tied_weights_freezes_and_the_plan_follows(pair: Workers) -> None:
    way = Way("gpt", depth=4, frozen=(0, 2, 3), period=2, options=PIPELINE)
    found = pair.run(run, way, 2)
    same(found, alone(way))
    first, *_, last = found[0].plans
    assert [stage.forward_only for stage in first.stages] == [False, False] and last != first, found[0].reasons


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_forty_steps_with_four_changes_of_the_plan(pair: Workers, workers: Workers, family: str, ranks: int) -> None:
    way = Way(family, options=PIPELINE if ranks == 2 else REPLICAS)
    found = (pair if ranks == 2 else workers).run(run, way, ranks)
    same(found, alone(way))
    assert len(found[0].plans) == 5
    print(family, ranks, found[0].reasons)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
def test_the_planner_may_choose_all(workers: Workers, family: str) -> None:
    way = Way(family)
    found = workers.run(run, way, 4)
    same(found, alone(way))
    print(family, [[(len(s.ops), s.ranks, s.forward_only) for s in plan.stages] for plan in found[0].plans])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_batch_statistics_change_in_frozen_layers_too(pair: Workers, workers: Workers, ranks: int) -> None:
    way = Way("resnet", options={"stages": ranks, "replicas": 1})
    pool = pair if ranks == 2 else workers
    same(pool.run(run, way, ranks), alone(way))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "bert", "gpt", "t5"])
def test_dropout_draws_what_one_rank_draws(workers: Workers, family: str) -> None:
    way = Way(family, dropout=0.2, options=REPLICAS)
    found = workers.run(run, way, 4)
    same(found, run(replace(way, options={}), 1, replan=False))


MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "slices": (2, {**PIPELINE, "token_slices": (4, 4), "cuts": ("layers.2",)}),
    "zero bubble": (2, {**PIPELINE, "schedule": "zb-h1", "cuts": ("layers.2",)}),
    "searched": (2, {"stages": 4, "stages_per_rank": 2, "schedule": "searched", "replicas": 1}),
    "in turn": (4, {"stages": 2, "replicas": 2, "replica_policy": "turn", "cuts": ("layers.2",)}),
    "recomputed": (2, {**PIPELINE, "recompute": "all", "cuts": ("layers.2",)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_every_kind_of_plan_has_stages_that_are_forward_only(pair: Workers, workers: Workers, kind: str) -> None:
    ranks, options = MORE[kind]
    way = Way("gpt", depth=5, frozen=(0, 2, 4, 5), period=3, options=options)
    found = (pair if ranks == 2 else workers).run(run, way, ranks)
    same(found, alone(way))
    assert all(own.backwards[0] for own in found) and not all(own.backwards[-1] for own in found)


@pytest.mark.slow
@pytest.mark.parametrize("master_weights", [False, True])
def test_the_loss_scale_goes_on(pair: Workers, master_weights: bool) -> None:
    dtype = torch.float16 if master_weights else torch.float32
    options = {"precision": "fp16", "master_weights": master_weights}
    way = Way("gpt", depth=6, frozen=(0, 2, 4, 5), period=6, options={**options, **PIPELINE}, dtype=dtype)
    found = pair.run(run, way, 2)
    expected = run(replace(way, options=options), 1, replan=False)
    assert found[0].scales == expected.scales
    assert found[0].losses == pytest.approx(expected.losses, rel=5e-3)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found[0].state[name].float(), tensor.float(), rtol=0.05, atol=5e-3)
