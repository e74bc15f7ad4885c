"""What another stage reads lies in memory as it lay in the captured program, also where ranks captured it otherwise."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from support.workers import Workers
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.runtime.messages.mailbox import Mailbox

CHANNELS_LAST = (60, 1, 15, 3)
"""The strides of images of (3, 4, 5) whose channels lie side by side."""


class Normed(nn.Module):
    """A convolution, then layer norm and a product over channels, as in ConvNeXt: its result lies as channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.wide = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Images(nn.Module):
    """Four such blocks and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Normed() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def made() -> tuple[nn.Module, torch.Tensor]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return Images().double(), torch.randn(7, 3, 4, 5, dtype=torch.float64)


def received(replicas: tuple[int, int]) -> tuple[set[tuple[int, ...]], float, dict[str, torch.Tensor]]:
    """Return the strides of what comes from another stage, the loss, and the gradients that this rank has."""
    model, batch = made()
    pipe = autopart.compile(
        model, f"cpu:{sum(replicas)}", sample=batch, stages=2, replicas=replicas, micro_batches=2, cuts=("blocks.2",),
        costs="analytic",
    )  # fmt: skip
    strides, receive = set(), Mailbox.receive

    def noted(*given: Any) -> dict[str, torch.Tensor]:
        found = receive(*given)
        strides.update(tensor.stride() for tensor in found.values())
        return found

    with mock.patch.object(Mailbox, "receive", noted):
        loss = float(pipe.step(batch))
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.close()
    return strides, loss, grads


@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (1, 3), (3, 1)])
def test_values_and_gradients_of_another_stage_lie_as_they_were_captured(
    pair: Workers, workers: Workers, replicas: tuple[int, int]
) -> None:
    model, batch = made()
    expected = model(batch)
    expected.backward()
    grads: dict[str, torch.Tensor] = {}
    for strides, loss, own in (pair if sum(replicas) == 2 else workers).run(received, replicas):
        assert strides == {CHANNELS_LAST}
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
        grads |= own
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-15)


def laid(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


def convolutions() -> nn.Module:
    """Return a model whose values lie as its input or its weights do."""
    torch.manual_seed(0)
    layers = [each for size in (4, 5, 3) for each in (nn.LazyConv2d(size, 3, padding=1), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(1)).double()
    model(images(1)[0])
    return model


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of images and targets."""
    draw = torch.Generator().manual_seed(rows)
    drawn = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in ((rows, 3, 4, 5), (rows, 1))]
    return drawn[0], drawn[1]


def apart(differs: str) -> tuple[list[float], torch.Tensor, dict[str, torch.Tensor]]:
    """Train and evaluate where tensors of the ranks lie otherwise; return losses, a prediction and gradients."""
    model, first = convolutions(), int(os.environ["RANK"]) == 0
    x, target = images(8)
    if differs == "weights" and first:
        model = model.to(memory_format=torch.channels_last)
    if differs == "batches" and first:
        x = laid(x)
    pipe = autopart.compile(
        model, "cpu:2", sample=(x, target), loss_fn=F.mse_loss, stages=2, micro_batches=2, cuts=("2",), costs="analytic"
    )
    later, wanted = images(5)
    given = (laid(later), wanted) if first else None  # others have a stand-in, which lies in the order of its axes
    losses = [float(pipe.step((x, target))), float(pipe.step(given)), float(pipe.eval_loss(given))]
    found = pipe.predict(laid(later) if first else None)
    grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.close()
    return losses, found, grads


@pytest.mark.parametrize("differs", ["weights", "batches", "later batches"])
def test_ranks_whose_tensors_lie_otherwise_agree_on_how_messages_lie(pair: Workers, differs: str) -> None:
    model, grads = convolutions(), dict[str, torch.Tensor]()
    (x, target), (later, wanted) = images(8), images(5)
    losses = [F.mse_loss(model(x), target), F.mse_loss(model(later), wanted)]
    sum(losses).backward()  # type: ignore[union-attr]
    for found, predicted, own in pair.run(apart, differs):
        assert found == pytest.approx([loss.item() for loss in (*losses, losses[1])], rel=1e-12)
        torch.testing.assert_close(predicted, model(later), rtol=1e-12, atol=1e-15)
        grads |= own
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-15)


class Drawing(nn.Module):
    """Random numbers over a value whose rows lie last, and over one that is expanded to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tokens = nn.Parameter(torch.randn(1, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.tanh(self.first(x).t())
        turned = turned * torch.rand_like(turned)
        tokens = self.tokens.expand(len(x), -1, -1)
        return self.last(turned.t()[:, None] + tokens * torch.rand_like(tokens)).square().mean()


def drawn(replicas: int, stages: int, rows: int) -> autopart.Verification:
    """Compare a plan with one stage on one rank, which draws for all rows at once."""
    torch.manual_seed(0)
    model, x = Drawing().double(), torch.randn(rows, 5, dtype=torch.float64)
    return autopart.verify(
        model, "cpu:2", sample=x, stages=stages, replicas=replicas, micro_batches=1, costs="analytic"
    )


@pytest.mark.parametrize(("replicas", "stages", "rows"), [(2, 1, 2), (2, 1, 5), (1, 2, 3)])
def test_random_numbers_do_not_depend_on_what_strides_of_a_part_show(
    pair: Workers, replicas: int, stages: int, rows: int
) -> None:
    found = pair.run(drawn, replicas, stages, rows)[0]
    assert found.ok, found.table()
