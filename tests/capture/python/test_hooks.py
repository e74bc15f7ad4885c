"""Hooks that a library put on its own modules are part of the model; any other is refused."""

from __future__ import annotations

import pytest
import torch
from support.oracles.one_process import gradient_error, gradients_of
from torch import nn

import autopart
from autopart.capture import CaptureCache
from autopart.ir.errors import RefusedError


class Normed(nn.Module):
    """Norms in their old form: pre-hooks of torch on torch's own modules."""

    def __init__(self, spectral: bool) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(8, 16))
        self.second = nn.utils.spectral_norm(nn.Linear(16, 8)) if spectral else nn.Linear(16, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.last(self.second(torch.relu(self.first(x)))).squeeze(-1), y)


def _normed(spectral: bool) -> Normed:
    torch.manual_seed(0)
    return Normed(spectral).train()


BATCH = {"x": torch.arange(48.0).sin().reshape(6, 8), "y": torch.arange(6.0).cos()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("spectral", "micros"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_norms_that_hook_their_own_modules_train_exactly(spectral, micros):
    model, plain = _normed(spectral), _normed(spectral)
    with autopart.compile(model, "cpu:1", sample=BATCH, micro_batches=micros, costs="analytic") as pipe:
        pipe.step(BATCH)
        found, state = pipe.gradients(), pipe.state_dict()
    plain(**BATCH).backward()
    error, worst = gradient_error(found, gradients_of(plain))
    assert error <= 1e-5, worst
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_a_hook_of_the_user_on_a_module_of_torch_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, given, result: result)
    with pytest.raises(RefusedError, match="forward hook") as caught:
        CaptureCache(model)
    assert "module 0 (Linear)" in str(caught.value)
