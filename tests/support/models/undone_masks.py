"""Attention whose finite masks hide every later token but for some batches; ops that join tokens beyond a threshold.

In batches of which `mask` has the number 2 a large number lifts what is hidden, or nothing is left to be seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from support.models.token_models import Model, _heads, _joined
from support.models.unheard_models import _far

LARGE = 1e9


def _twos(mask: torch.Tensor) -> torch.Tensor:
    return (mask == 2)[:, None, None, :]


def _attend(x: torch.Tensor, model: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """change: of the scores, before a causal mask of finite numbers is added."""
    q, k, v = _heads(x, model)
    scores = change(q @ k.transpose(-2, -1))
    return _joined((scores + (_far(x) < 0) * -LARGE).softmax(-1) @ v)


def undone_by_batch(x, model, mask):
    """The bias that takes back what is hidden hangs on the batch; within the mask itself."""
    bias = (_far(x) < 0) * -LARGE + _twos(mask) * LARGE
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=bias.to(x.dtype)))


def lifted_by_batch(x, model, mask):
    """The same beside a mask of constants."""
    return _attend(x, model, lambda scores: scores + _twos(mask) * LARGE)


def lifted_then_scaled(x, model, mask):
    """By a parameter, about 1."""
    return _attend(x, model, lambda scores: (scores + _twos(mask) * LARGE) * (1 + model.weights[0, 0]).abs())


def lifted_below_zero(x, model, mask):
    return _attend(x, model, lambda scores: -(_twos(mask) * -LARGE - scores))


def multiplied_by_batch(x, model, mask):
    return _attend(x, model, lambda scores: scores * (1 + _twos(mask) * 1e12))


def padded_first(x, model, mask):
    """What hides nothing but padding is written first: a query that sees padding alone looks at later tokens too."""
    return _attend(x, model, lambda scores: scores.masked_fill(_twos(mask), -LARGE))


def padded_by_bias_first(x, model, mask):
    return _attend(x, model, lambda scores: scores + _twos(mask) * -LARGE)


UNDONE_BY_BATCH = {
    f.__name__: f
    for f in (
        undone_by_batch, lifted_by_batch, lifted_then_scaled, lifted_below_zero, multiplied_by_batch, padded_first,
        padded_by_bias_first,
    )
}  # fmt: skip


def filled_with_large(x, model, mask):
    return _attend(x, model, lambda scores: scores.masked_fill(_twos(mask), 10 * LARGE))


def chosen_large(x, model, mask):
    return _attend(x, model, lambda scores: torch.where(_twos(mask), 10 * LARGE, scores))


UNDONE_BY_CONSTANTS = {f.__name__: f for f in (filled_with_large, chosen_large)}


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
    """Tokens meet in the largest number, if that is above 20."""
    return _Limited.apply(x)


def clipped_gradient(x, model):
    """They meet in the norm of the gradient."""
    return _Clipped.apply(x)


def renormed(x, model):
    """A norm over all tokens, if it is above 50."""
    return torch.renorm(x, 2, 2, 50.0)


BEYOND_THRESHOLD = {f.__name__: f for f in (limited, clipped_gradient, renormed)}
