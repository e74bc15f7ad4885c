"""What may be cut into slices of tokens, what may not, and that what may is exact: small models written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.grids import sampled
from support.models.tokens.token_models import (
    CAUSAL,
    LEAKS,
    LOSS_LEAKS,
    LOSSES,
    MASKED,
    MASKED_LEAKS,
    SEQ,
    Model,
    _heads,
    _joined,
    dropped,
    dropped_inside,
    dropped_weights,
    token_batch,
)
from support.models.tokens.unusual_token_models import (
    CAUSAL_REFUSED,
    EXACT,
    UNUSUAL_LEAKS,
    UNUSUAL_MASKED_LEAKS,
    WithoutLast,
    _far,
)
from support.oracles.sliced import analysed, checks_hold, future_shows, inputs_of, run_sliced, unsliced, worst_error
from torch.nn import functional as F

from autopart.ir.errors import RefusedError
from autopart.rng import micro_key

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


# -- tests -----------------------------------------------------------------------------------------------------------


LENGTHS = ((5, 4, 2, 1), (1,) * SEQ, (3, 9))
FAST = ("exp_of_scores", "causal_convolution")
QUICK_LEAKS = ("pooled", "exp_of_later_scores")


def check_equal(mixer, batch, layers: int = 1, loss=None, make=Model) -> None:
    found = analysed(make(mixer, layers, loss).double().train(), batch)
    inputs = inputs_of(found)
    expected_loss, expected = unsliced(found, inputs)
    for lengths in LENGTHS:
        for cut_at in ((), (len(found.captured.graph.ops) // 2,)):
            loss, gradients = run_sliced(found, inputs, lengths, cut_at)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
            assert worst_error(gradients, expected) <= 1e-10
    assert not future_shows(found, inputs, SEQ // 2)


@pytest.mark.parametrize("name", FAST)
def test_causal_models_are_exact(name):
    check_equal(CAUSAL[name], token_batch())


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL | EXACT)
def test_causal_models_of_two_layers_are_exact(name):
    check_equal((CAUSAL | EXACT)[name], token_batch(), layers=2)


def test_packed_documents_are_exact():
    check_equal(MASKED["packed"], token_batch(mask="documents"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("mask", ["padding", "documents"])
def test_masks_that_depend_on_inputs_are_exact(name, mask):
    check_equal(MASKED[name], token_batch(mask=mask), layers=2)


REASONS = {
    "all_tokens": ("scaled_dot_product_attention", "neither a mask nor is_causal="),
    "one_later": ("scaled_dot_product_attention", "not proven to hide every later token"),
    "one_cell": ("scaled_dot_product_attention", "not proven to hide every later token"),
    "little_bias": ("scaled_dot_product_attention", "not proven to hide every later token"),
    "softmax_of_queries": ("softmax", "mixes all of the tokens"),
    "late_mask": ("softmax", "not proven to hide every later token"),
    "flipped": ("flip", "mixes all of the tokens"),
    "pooled": ("sub", "mean sums over all tokens"),
    "largest": ("amax", "mixes all of the tokens"),
    "next_token": ("slice", "picks some of the tokens by their place"),
    "rolled": ("roll", "mixes all of the tokens"),
    "centred_convolution": ("conv1d", "convolves a token with later ones"),
    "norm_of_tokens": ("_native_batch_norm_legit_functional", "takes statistics over all tokens"),
    "sorted_tokens": ("sort", "mixes all of the tokens"),
    "first_token": ("slice", "picks some of the tokens by their place"),
    "global_state": ("matmul", "matmul sums over all tokens"),
    "exp_of_later_scores": ("sum", "not proven to hide every later token"),
    "prefix_mask": ("scaled_dot_product_attention", "not proven to hide every later token"),
}


@pytest.mark.parametrize("name", [n if n in QUICK_LEAKS else pytest.param(n, marks=pytest.mark.slow) for n in REASONS])
def test_what_shows_a_later_token_is_refused_by_name(name):
    mixer = (LEAKS | MASKED_LEAKS)[name]
    refusal = analysed(Model(mixer).train(), token_batch(mask="documents" if name in MASKED_LEAKS else "")).recipe
    assert isinstance(refusal, RefusedError)
    op, why = REASONS[name]
    assert refusal.what.startswith(f"{op} ") and why in refusal.why
    assert "token_models.py" in refusal.where and refusal.fix


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tril_softmax", "is_causal", "running_mean"])
def test_a_last_token_that_is_cut_off_is_no_obstacle(name):
    check_equal(CAUSAL[name], token_batch(), layers=2, make=WithoutLast)


QUICK_CANCELLED = ("cancelled_by_bias",)


@pytest.mark.parametrize(
    "name", [n if n in QUICK_CANCELLED else pytest.param(n, marks=pytest.mark.slow) for n in CANCELLED_BY_BATCH]
)
def test_a_batch_that_undoes_a_mask_is_refused_and_others_are_exact(name):
    batch = token_batch(mask="padding")
    check_equal(CANCELLED_BY_BATCH[name], batch)
    found = analysed(Model(CANCELLED_BY_BATCH[name]), batch)
    assert checks_hold(found, inputs_of(found))
    batch["mask"][1, :3] = 2
    assert not checks_hold(found, inputs_of(found))


@pytest.mark.parametrize("name", sampled(CANCELLED_BY_CONSTANTS))
def test_a_large_number_among_masked_scores_is_refused(name):
    refusal = analysed(Model(CANCELLED_BY_CONSTANTS[name]), token_batch(mask="padding")).recipe
    assert isinstance(refusal, RefusedError) and "so large that it may undo" in refusal.why


@pytest.mark.parametrize("name", sampled(BEYOND_THRESHOLD, 3))
def test_tokens_that_meet_beyond_a_threshold_are_refused(name):
    refusal = analysed(Model(BEYOND_THRESHOLD[name]), token_batch()).recipe
    assert isinstance(refusal, RefusedError) and refusal.why == "no rule says how it treats tokens"


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL_REFUSED | UNUSUAL_LEAKS | UNUSUAL_MASKED_LEAKS)
def test_what_no_rule_was_written_for_is_refused(name):
    """Of causal ones too: what is not understood is not cut."""
    masked = name in UNUSUAL_MASKED_LEAKS
    mixer = (CAUSAL_REFUSED | UNUSUAL_LEAKS | UNUSUAL_MASKED_LEAKS)[name]
    refusal = analysed(Model(mixer, 2), token_batch(mask="padding" if masked else "")).recipe
    assert isinstance(refusal, RefusedError)
    assert "token_models.py" in refusal.where and refusal.why and refusal.fix  # torch keeps lines of forward() alone


def test_masks_of_dropout_are_those_of_the_whole_sequence():
    with micro_key(3, 1, 0):
        check_equal(dropped, token_batch())


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [dropped_inside, dropped_weights])
def test_random_numbers_are_those_of_the_whole_sequence(mixer):
    with micro_key(3, 1, 0):
        check_equal(mixer, token_batch(), layers=2)


@pytest.mark.parametrize("name", [n if n == "masked_mean" else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES])
def test_losses_add_up(name):
    check_equal(CAUSAL["is_causal"], token_batch(), loss=LOSSES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSS_LEAKS)
def test_losses_that_do_not_add_up_are_refused(name):
    refusal = analysed(Model(CAUSAL["is_causal"], loss=LOSS_LEAKS[name]), token_batch()).recipe
    assert isinstance(refusal, RefusedError)


class Counted(Model):
    """Counts its steps, and averages what it sees, in this order."""

    def __init__(self, averages: bool) -> None:
        super().__init__(CAUSAL["is_causal"])
        self.averages = averages
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, ids, labels, mask=None):
        self.steps += 1
        if self.averages:
            self.average.lerp_(self.embedding(ids).detach().mean((0, 1)), 0.1)
        return super().forward(ids, labels, mask)


@pytest.mark.parametrize("averages", [True, False])
def test_a_changed_buffer_is_refused_by_the_name_of_one_that_depends_on_the_batch(averages):
    refusal = analysed(Counted(averages), token_batch()).recipe
    assert isinstance(refusal, RefusedError)
    assert f"it changes buffer {'average' if averages else 'steps'}," in refusal.why
