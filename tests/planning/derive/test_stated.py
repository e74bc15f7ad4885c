"""What the user states about an opaque loss is tried on numbers: loss and gradients, on rows that are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.grids import sampled
from torch import nn
from torch.autograd import Function

from autopart.batch.batch import flatten
from autopart.capture.cache import CaptureCache
from autopart.ir.errors import RefusedError
from autopart.ir.graph import LossReduction, Size
from autopart.planning.derive.family import capture_family
from autopart.planning.derive.reduction import loss_reduction


class L2Wrap(Function):
    """RWKV's: the loss itself; its backward adds a gradient that the incoming one does not scale."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        top, ids = y.max(-1, keepdim=True)
        return grad, torch.zeros_like(y).scatter_(-1, ids, top * 1e-6 / y[..., 0].numel())


class Fused(Function):
    """A cross entropy that computes its gradient in the forward: a mean over the labels that are not ignored."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore: int, reduction: str) -> torch.Tensor:
        kept = (labels != ignore)[:, None]
        wanted = F.one_hot(labels.clamp(min=0), logits.shape[-1])
        grad = (logits.softmax(-1) - wanted) * kept
        losses = -(logits.log_softmax(-1) * wanted * kept).sum()
        count = kept.sum() if reduction == "mean" else 1
        ctx.save_for_backward(grad / count)
        return losses / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None, None, None


class Squares(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, divisor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.divisor = divisor
        return x.square().mean(1).mean() * divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * 2 * grad * ctx.divisor / ctx.saved_tensors[0].numel(), None


class Net(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), labels)


LABELS = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(0))
IGNORED = torch.where(torch.arange(6) < 1 + torch.arange(8)[:, None] % 6, LABELS, -100)
NONE_IN_ONE_ROW = torch.where(torch.arange(8)[:, None] != 3, IGNORED, -100)


def settled(loss: Callable[..., torch.Tensor], labels: torch.Tensor, stated: str) -> LossReduction:
    torch.manual_seed(0)
    batch = flatten((torch.randn(8, 6, 4), labels))
    captures = CaptureCache(Net(loss), None)
    return loss_reduction(capture_family(captures, batch, Size(2), [Size(2), Size(3)]), [(2, 2, 2, 2)], stated)


def fused(ignore: int = -100, reduction: str = "mean") -> Callable[..., torch.Tensor]:
    return lambda logits, labels: Fused.apply(logits.flatten(0, 1), labels.flatten(), ignore, reduction)


def test_a_true_statement_about_an_opaque_loss_is_taken() -> None:
    assert settled(fused(reduction="sum"), LABELS, "sum") == LossReduction("sum")
    assert settled(lambda y, labels: Squares.apply(y.flatten(1), 1.0), LABELS, "mean") == LossReduction("rows")


@pytest.mark.parametrize("labels", [LABELS, IGNORED, NONE_IN_ONE_ROW], ids=["none", "some", "a whole row"])
@pytest.mark.parametrize("stated", sampled(["token-mean", "mean"]))
def test_a_mean_over_labels_that_are_not_ignored_is_weighted_by_their_count(stated: str, labels: torch.Tensor) -> None:
    found = settled(fused(), labels, stated)
    assert found.kind == "tokens" and found.ignore == -100


def test_the_number_that_is_ignored_may_be_an_argument_of_the_loss() -> None:
    found = settled(fused(0), LABELS, "mean")
    assert found.kind == "tokens" and found.ignore == 0


@pytest.mark.parametrize(("stated", "loss"), [
    ("sum", fused()),
    ("mean", fused(reduction="sum")),
    ("token-mean", fused(reduction="sum")),
    ("mean", lambda y, labels: Squares.apply(y.flatten(1), float(len(y)))),
])  # fmt: skip
def test_a_false_statement_about_an_opaque_loss_is_refused(stated: str, loss: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RefusedError, match="numbers show") as caught:
        settled(loss, IGNORED, stated)
    assert "test_stated.py" in caught.value.where and "the loss of" in caught.value.why


@pytest.mark.parametrize("stated", sampled(["mean", "sum", "token-mean"], 3))
def test_a_backward_that_is_not_scaled_by_the_gradient_that_comes_in_is_refused(stated: str) -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return L2Wrap.apply(F.cross_entropy(y.flatten(0, 1), labels.flatten()), y)

    with pytest.raises(RefusedError, match="numbers show") as caught:
        settled(loss, LABELS, stated)
    assert stated != "mean" or "not scaled by the gradient" in caught.value.why
