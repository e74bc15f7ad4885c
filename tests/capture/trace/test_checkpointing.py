"""Gradient checkpointing inside a model: what it computes, and which gradients it lets flow, is kept; what it would
compute again is computed again by the plan, unless it is of the reentrant kind, or the user says otherwise."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.grids import sampled
from support.oracles.one_process import gradient_error, gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, capture
from autopart.capture.python.guards import CaptureWarning
from autopart.ir.errors import RefusedError

BATCH = torch.arange(6) % 4


def ask_for_gradients(module, given, output):
    output.requires_grad_(True)


class Checkpointed(nn.Module):
    """frozen: the first layer, so that what is checkpointed gets no input that needs a gradient."""

    def __init__(self, reentrant: bool, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.last = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.words.requires_grad_(not frozen)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda h: self.inner(h).tanh(), self.words(x), use_reentrant=self.reentrant)
        return self.last(hidden).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize(
    ("reentrant", "frozen", "hooked"),
    [(True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_checkpointed_parts_have_the_gradients_of_plain_torch(reentrant, frozen, hooked):
    models = [Checkpointed(reentrant, frozen) for _ in range(2)]
    if hooked:
        for model in models:
            model.words.register_forward_hook(ask_for_gradients)
    plain, mine = models
    plain(BATCH).backward()
    assert (plain.inner.weight.grad is None) == (reentrant and frozen and not hooked)
    with pytest.warns(CaptureWarning, match="gradient checkpointing") if reentrant else contextlib.nullcontext():
        pipe = autopart.compile(mine, "cpu:1", sample=BATCH, micro_batches=2, costs="analytic")
    assert [len(stage.recompute) for stage in pipe.plan.stages] == [0 if reentrant else 1]
    with pipe:
        pipe.step(BATCH)
        error, worst = gradient_error(pipe.gradients(), gradients_of(plain))
        assert error <= 1e-5, worst


def test_a_hook_that_does_more_than_ask_for_gradients_is_refused():
    model = Checkpointed(True, False)
    model.words.register_forward_hook(lambda module, given, output: print(output.requires_grad_(True)))
    with pytest.raises(RefusedError, match="forward hook"):
        CaptureCache(model)


class Layered(nn.Module):
    """Layers that are checkpointed with dropout inside, and one inside another; it changes a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))

    def nested(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self.layers[1], hidden, use_reentrant=False)
        return self.layers[2](inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        with torch.no_grad():
            self.seen += hidden.mean(0)
        hidden = hidden + checkpoint(self.layers[0], hidden, use_reentrant=False)
        return checkpoint(self.nested, hidden, use_reentrant=False).square().mean()


def modules_of(groups, graph):
    home = {op.name: op.module for op in graph.ops}
    return [sorted({".".join(home[name].split(".")[:2]) for name in group}) for group in groups]


def test_each_call_is_a_group_and_the_outer_one_counts():
    captured = capture(Layered(), flatten(BATCH))
    assert modules_of(captured.checkpointed, captured.graph) == [["layers.0"], ["layers.1", "layers.2"]]


@pytest.mark.parametrize(
    ("recompute", "groups"),
    sampled(
        [
            ("auto", [["layers.0"], ["layers.1", "layers.2"]]),
            ("off", []),
            (["layers.*"], [["layers.0"], ["layers.1"], ["layers.2"]]),
            (["words", "layers.2"], [["words"], ["layers.2"]]),
        ]
    ),
)
def test_what_the_user_says_of_recomputation_comes_before_what_the_model_does(recompute, groups):
    pipes = [
        autopart.compile(
            Layered(), "cpu:1", sample=BATCH, micro_batches=2, costs="analytic", recompute=wanted, cache=False
        )
        for wanted in ("off", recompute)
    ]
    (stage,) = pipes[1].plan.stages
    assert modules_of(stage.recompute, capture(Layered(), flatten(BATCH[:3])).graph) == groups
    losses = [pipe.step(BATCH) for pipe in pipes]
    assert losses[0] == losses[1]
    kept, again = (pipe.gradients() for pipe in pipes)
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name
    for pipe in pipes:
        pipe.close()
