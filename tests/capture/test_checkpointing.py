"""Gradient checkpointing inside a model is ignored: what it computes, and which gradients it lets flow, is kept."""

from __future__ import annotations

import pytest
import torch
from support.one_process import gradient_error, gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.capture import CaptureCache
from autopart.capture.guards import CaptureWarning
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
    with pytest.warns(CaptureWarning, match="gradient checkpointing"):
        pipe = autopart.compile(mine, "cpu:1", sample=BATCH, micro_batches=2, costs="analytic")
    with pipe:
        pipe.step(BATCH)
        error, worst = gradient_error(pipe.gradients(), gradients_of(plain))
        assert error <= 1e-5, worst


def test_a_hook_that_does_more_than_ask_for_gradients_is_refused():
    model = Checkpointed(True, False)
    model.words.register_forward_hook(lambda module, given, output: print(output.requires_grad_(True)))
    with pytest.raises(RefusedError, match="forward hook"):
        CaptureCache(model)
