"""Training flags: each module's own is captured, and a change of one captures a step anew, evaluation none."""

from __future__ import annotations

import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, capture
from autopart.ir.graph import Size


class Asking(nn.Module):
    """Asks a flag otherwise than by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).pow(2).mean() * (2.0 if vars(self.inner)["training"] else 1.0)


class Noisy(nn.Module):
    """A loss function that asks its flag."""

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (found - wanted).pow(2).mean() * (2.0 if self.training else 1.0)


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
    assert capturer.refresh(training=True) == ["norm.training is False"]
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
    assert capturer.refresh(training=True) == ["norm.training is False"]


def test_flags_that_nothing_reads_capture_nothing_anew():
    model = Normed()
    capturer = CaptureCache(model)
    step = capturer(flatten(rows()), Size(3))
    model.first.eval()
    model.training = False
    assert capturer.refresh(training=True) == []
    assert capturer(flatten(rows()), Size(3)) is step


def test_a_flag_that_is_read_among_all_attributes_of_a_module_is_followed():
    model = Asking()
    capturer = CaptureCache(model)
    capturer(flatten(rows()), Size(3))
    model.inner.eval()
    assert capturer.refresh(training=True) == ["inner.training is False"]


def test_the_flag_of_a_loss_function_is_followed():
    loss = Noisy()
    capturer = CaptureCache(nn.Linear(4, 4), loss)
    capturer(flatten((rows(), rows()), with_target=True), Size(3))
    assert capturer.refresh(training=True) == []
    loss.eval()
    assert capturer.refresh(training=True) == ["Noisy.training is False"]


def test_a_compiled_part_of_a_model_has_no_flag_of_its_own():
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Sequential(nn.Dropout(0.5)), backend="eager"))
    capturer = CaptureCache(model, lambda found, wanted: (found - wanted).pow(2).mean())
    capturer(flatten((rows(), rows()), with_target=True), Size(3))
    assert capturer.refresh(training=True) == []
    model[1].eval()
    assert capturer.refresh(training=True) == ["1._orig_mod.0.training is False"]
