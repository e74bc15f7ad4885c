"""Losses of several terms with different counts, and masks made in forward(), equal those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.jobs import misleading_jobs as jobs
from support.jobs.step_jobs import cluster, refusal_of
from support.models.loss_models import LOSSES
from support.models.mask_models import MASKED
from support.models.misleading_models import Net, X, Y
from support.workers import Workers
from torch import nn

import autopart

Steps = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Losses, the gradients of the last step and the state after it."""


class Weighing(nn.Module):
    """A loss over two terms whose weights are learned, with a learned output head."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Parameter(torch.tensor([0.1, -0.2]).double())
        self.head = nn.Linear(8, 8, bias=False).double()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        classes = F.cross_entropy(self.head(output), target, ignore_index=0)
        terms = torch.stack([classes, output.square().sum() / 50])
        return (torch.exp(-self.spread) * terms + self.spread).sum()


class Body(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def parts() -> tuple[nn.Module, Weighing]:
    torch.manual_seed(1)
    return Body().double(), Weighing()


BATCHES = [(X(7, seed).double(), Y(7, seed)) for seed in range(4)]


def names(model: nn.Module, loss: nn.Module, of: str) -> dict[str, torch.Tensor]:
    """Return the gradients or the values of the model and of the loss function, the latter under "loss_fn."."""
    found = {**dict(model.named_parameters()), **{f"loss_fn.{n}": p for n, p in loss.named_parameters()}}
    return {n: (p.grad if of == "grad" else p).detach().clone() for n, p in found.items()}


def alone() -> Steps:
    """Train in one process and return its results."""
    model, loss = parts()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, names(model, loss, "grad"), names(model, loss, "value")


def opened(model: nn.Module, loss: nn.Module) -> autopart.Pipe:
    return autopart.compile(
        model, cluster(), sample=BATCHES[0], loss_fn=loss, micro_batches=3, stages=2, costs="analytic"
    )


def train(pipe: autopart.Pipe, batches: list[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        losses.append(pipe.step(batch).item())
        optimizer.step()


def piped() -> tuple[Steps, dict[str, torch.Tensor], list[float]]:
    """Train in a pipe and return its results, the values after close, and two losses after loading the state."""
    model, loss = parts()
    losses: list[float] = []
    with opened(model, loss) as pipe:
        train(pipe, BATCHES, losses)
        gradients, state = pipe.gradients(), pipe.state_dict()
    kept = names(model, loss, "value")
    fresh, fresh_loss = parts()
    again: list[float] = []
    with opened(fresh, fresh_loss) as pipe:
        pipe.load_state_dict(state)
        again.append(pipe.eval_loss(BATCHES[0]).item())
    return (losses, gradients, state), kept, [*again, loss(model(BATCHES[0][0]), BATCHES[0][1]).item()]


def verified() -> tuple[bool, set[str], bool]:
    """Return whether `verify` succeeds, the gradients it compared, and whether it left the loss function unchanged."""
    model, loss = parts()
    before = copy.deepcopy(loss.state_dict())
    found = autopart.verify(
        model, cluster(), sample=BATCHES[0], loss_fn=loss, micro_batches=3, stages=2, costs="analytic"
    )
    same = all(torch.equal(before[n], t) for n, t in loss.state_dict().items())
    untouched = same and all(p.grad is None for p in loss.parameters())
    return found.ok, {d.name for d in found.gradients}, untouched


def refused(kind: str) -> autopart.AutopartError | None:
    """Return the error that compile raises for a loss function whose parameters it cannot own."""
    model, loss = parts()
    if kind == "a name of the model":
        model.loss_fn = nn.Linear(8, 8)
    given = {"a function": lambda output, target: loss(output, target), "a method": loss.forward}.get(kind, loss)
    return refusal_of(lambda: opened(model, given).close())


# -- tests -----------------------------------------------------------------------------------------------------------


SLOW = ("class weights", "a detector", "spans", "a transformer with masks", "packed sequences")
NAMES = [name if name not in SLOW else pytest.param(name, marks=pytest.mark.slow) for name in [*LOSSES, *MASKED]]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_exact_even_if_a_micro_batch_counts_nothing(pair: Workers, name: str) -> None:
    losses, gradients, error = pair.run(jobs.piped, name)[0]
    expected, plain = jobs.alone(name)
    assert error is None, error
    assert losses == pytest.approx(expected, rel=1e-10)
    for found, wanted in zip(gradients, plain, strict=True):
        for parameter, gradient in wanted.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-13)


def test_a_loss_function_with_parameters_is_trained_saved_and_loaded(pair: Workers) -> None:
    losses, gradients, state = alone()
    for found, kept, (loaded, plain) in pair.run(piped):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)
        assert found[2].keys() == state.keys() == kept.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found[2][name], tensor, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(kept[name], tensor, rtol=1e-9, atol=1e-12)
        assert loaded == pytest.approx(plain, rel=1e-10)


@pytest.mark.slow
def test_verify_compares_the_parameters_of_a_loss_function_and_leaves_it_as_it_was(pair: Workers) -> None:
    for ok, compared, untouched in pair.run(verified):
        assert ok and untouched and {"loss_fn.spread", "loss_fn.head.weight"} <= compared


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("a name of the model", "the model has a module loss_fn", marks=pytest.mark.slow),
        ("a function", "a parameter that belongs to neither the model nor"),
        pytest.param("a method", "a parameter that belongs to neither the model nor", marks=pytest.mark.slow),
    ],
)
def test_loss_parameters_that_would_not_be_trained_are_refused(pair: Workers, kind: str, words: str) -> None:
    for error in pair.run(refused, kind):
        assert error is not None and words in error.what and error.fix
