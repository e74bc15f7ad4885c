"""What another stage reads lies in memory as it lay in the captured program."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.workers import Workers
from torch import nn

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
    return Images().double(), torch.randn(8, 3, 4, 5, dtype=torch.float64)


def received(replicas: int) -> tuple[set[tuple[int, ...]], float, dict[str, torch.Tensor]]:
    """Return the strides of what comes from another stage, the loss, and the gradients that this rank has."""
    model, batch = made()
    pipe = autopart.compile(
        model, f"cpu:{2 * replicas}", sample=batch, stages=2, replicas=replicas, micro_batches=2, cuts=("blocks.2",),
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_values_and_gradients_of_another_stage_lie_as_they_were_captured(
    pair: Workers, workers: Workers, replicas: int
) -> None:
    model, batch = made()
    expected = model(batch)
    expected.backward()
    grads: dict[str, torch.Tensor] = {}
    for strides, loss, own in (pair if replicas == 1 else workers).run(received, replicas):
        assert strides == {CHANNELS_LAST}
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
        grads |= own
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-15)
