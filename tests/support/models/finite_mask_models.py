"""Attention whose finite masks hide later tokens except in some batches, and ops that mix tokens above a threshold.

In batches whose `mask` contains the number 2, a large value makes hidden tokens visible or leaves nothing visible.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from support.models.token_models import Model, _heads, _joined
from support.models.unusual_token_models import _far

LARGE = 1e9


def _twos(mask: torch.Tensor) -> torch.Tensor:
    return (mask == 2)[:, None, None, :]


def _attend(x: torch.Tensor, model: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return attention with a finite causal mask. change: applied to the scores before the mask is added."""
    q, k, v = _heads(x, model)
    scores = change(q @ k.transpose(-2, -1))
    return _joined((scores + (_far(x) < 0) * -LARGE).softmax(-1) @ v)


def cancelled_in_the_mask(x, model, mask):
    """The mask itself contains a bias from the batch that cancels it."""
    bias = (_far(x) < 0) * -LARGE + _twos(mask) * LARGE
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=bias.to(x.dtype)))


def cancelled_by_bias(x, model, mask):
    """A bias from the batch cancels a constant mask."""
    return _attend(x, model, lambda scores: scores + _twos(mask) * LARGE)


def cancelled_then_scaled(x, model, mask):
    """A bias from the batch, scaled by a parameter near 1, cancels the mask."""
    return _attend(x, model, lambda scores: (scores + _twos(mask) * LARGE) * (1 + model.weights[0, 0]).abs())


def cancelled_and_negated(x, model, mask):
    return _attend(x, model, lambda scores: -(_twos(mask) * -LARGE - scores))


def multiplied_by_batch(x, model, mask):
    return _attend(x, model, lambda scores: scores * (1 + _twos(mask) * 1e12))


def padded_first(x, model, mask):
    """Padding is masked before the causal mask, so a query that sees only padding attends to later tokens too."""
    return _attend(x, model, lambda scores: scores.masked_fill(_twos(mask), -LARGE))


def padded_by_bias_first(x, model, mask):
    return _attend(x, model, lambda scores: scores + _twos(mask) * -LARGE)


CANCELLED_BY_BATCH = {
    f.__name__: f
    for f in (
        cancelled_in_the_mask, cancelled_by_bias, cancelled_then_scaled, cancelled_and_negated, multiplied_by_batch,
        padded_first, padded_by_bias_first,
    )
}  # fmt: skip


def filled_with_large(x, model, mask):
    return _attend(x, model, lambda scores: scores.masked_fill(_twos(mask), 10 * LARGE))


def chosen_large(x, model, mask):
    return _attend(x, model, lambda scores: torch.where(_twos(mask), 10 * LARGE, scores))


CANCELLED_BY_CONSTANTS = {f.__name__: f for f in (filled_with_large, chosen_large)}


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / x.abs().amax().clamp(min=20)

    @staticmethod
    def backward(ctx, g):
        return g / 20


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.where(g.norm() < 0.01, 2.0, 1.0) * g


def limited(x, model):
    """All tokens depend on the largest value if it is above 20."""
    return _Limited.apply(x)


def clipped_gradient(x, model):
    """All tokens depend on the norm of the gradient."""
    return _Clipped.apply(x)


def renormed(x, model):
    """All tokens depend on a norm if it is above 50."""
    return torch.renorm(x, 2, 2, 50.0)


BEYOND_THRESHOLD = {f.__name__: f for f in (limited, clipped_gradient, renormed)}
