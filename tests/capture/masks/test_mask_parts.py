"""Tests of attention masks that are sums, fills and choices: which stay, what is asked, and exact gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.grids import sampled
from torch import nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.graph import Size

ROWS, TOKENS, WIDTH = 4, 6, 8
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Two layers of attention, each with a mask that `mask` builds anew from the padding of the batch."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mask, self.project = mask, nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(1, 2, TOKENS, TOKENS))

    def forward(self, x: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, shown))
            x = x + y.transpose(1, 2).flatten(-2)
        return x.square().mean()


def later() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def filled(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, float("-inf"))


def summed(model: Model, shown: torch.Tensor) -> torch.Tensor:
    return filled(later()) + filled(shown == 0).view(-1, 1, 1, TOKENS)


def chosen(model: Model, shown: torch.Tensor) -> torch.Tensor:
    wide = shown.bool()[:, None, None].expand(-1, 1, TOKENS, TOKENS)
    return torch.where(wide, torch.zeros(1, 2, TOKENS, TOKENS), LOWEST)


def biased(model: Model, shown: torch.Tensor) -> torch.Tensor:
    wide = shown.bool()[:, None, None].expand(-1, 1, TOKENS, TOKENS)
    return torch.where(wide, model.bias, LOWEST)


def negated(model: Model, shown: torch.Tensor) -> torch.Tensor:
    return ~(shown == 0)[:, None, None, :] & ~later()


def raised(model: Model, shown: torch.Tensor) -> torch.Tensor:
    """A fill that hides nothing: scores are only lowered by 1."""
    hidden = (shown != 2)[:, None, None, :]
    return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -1.0)


def refilled(model: Model, shown: torch.Tensor) -> torch.Tensor:
    """A fill of memory that another op fills too."""
    mask = filled((shown == 0)[:, None, None, :])
    mask.masked_fill_((shown == 1)[:, None, None, :] & (torch.arange(TOKENS) == 2), float("-inf"))
    return mask


def batch(*, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shown = torch.ones(ROWS, TOKENS, dtype=torch.long)
    if padded:
        shown[1, 4:] = 0
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(4)), shown


CASES = [
    (summed, False, "hides later tokens"),
    (summed, True, "stays"),
    (negated, False, "hides later tokens"),
    (negated, True, "stays"),
    (chosen, False, "hides nothing"),
    (chosen, True, "stays"),
    (biased, False, "adds a bias and hides nothing"),
    (biased, True, "stays"),
    (raised, False, "stays"),
    (refilled, False, "stays"),
]


@pytest.mark.parametrize(
    ("mask", "padded", "effect", "micro_batches"), sampled([(*case, micros) for case in CASES for micros in (1, 2)], 5)
)
def test_masks_are_judged_once_for_all_layers_and_gradients_are_exact(
    mask: Mask, padded: bool, effect: str, micro_batches: int
) -> None:
    given = batch(padded=padded)
    captured = CaptureCache(Model(mask))(flatten(given), Size(ROWS))
    assert set(captured.masks) == {effect}
    if mask in (summed, negated, chosen, biased):
        assert captured.questions is not None
        assert len(captured.questions.asked) <= (2 if mask in (chosen, biased) and padded else 1)
    plain, ours = Model(mask), Model(mask)
    loss = plain(*given)
    loss.backward()
    with autopart.compile(ours, "cpu:1", sample=given, micro_batches=micro_batches, costs="analytic") as pipe:
        assert abs(pipe.step(given).item() - loss.item()) <= 1e-6 * abs(loss.item())
        for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
            if a.grad is None:
                assert b.grad is None or not b.grad.any(), name
            else:
                torch.testing.assert_close(b.grad, a.grad, msg=name)
        other = batch(padded=not padded)  # another kind of batch
        assert abs(pipe.step(other).item() - plain(*other).item()) <= 1e-6
