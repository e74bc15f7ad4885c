"""Training flags: each module's own is captured, and a change of one captures a step anew, evaluation none."""

from __future__ import annotations

import torch
from torch import nn

from autopart.capture import CaptureCache, capture
from autopart.capture.batch import flatten
from autopart.ir.size import Size


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).pow(2).sum()


def rows() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def test_each_modules_own_training_flag_is_captured():
    model = Normed()
    model.norm.eval()
    assert capture(model, flatten(rows())).graph.updates == ()
    model.norm.train()
    assert {name for name, _ in capture(model, flatten(rows())).graph.updates} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_training_flags_are_followed_and_evaluation_does_not_ask_for_them():
    model = Normed()
    capturer = CaptureCache(model)
    assert capturer(flatten(rows()), Size(3)).graph.updates
    model.eval()
    assert capturer.refresh(training=False) == []
    assert "the model.training is False" in capturer.refresh(training=True)
    assert not capturer(flatten(rows()), Size(3)).graph.updates
    assert not model.training


def test_evaluation_between_two_steps_captures_no_step_anew():
    model = Normed()
    capturer = CaptureCache(model)
    step = capturer(flatten(rows()), Size(3))
    model.eval()
    assert capturer.refresh(training=False) == []
    capturer(flatten(rows()), Size(6), "loss")
    model.train()
    assert capturer.refresh(training=True) == []
    assert capturer(flatten(rows()), Size(3)) is step
    model.eval()  # a step in eval mode is another program, though evaluation was captured in it
    assert "the model.training is False" in capturer.refresh(training=True)
