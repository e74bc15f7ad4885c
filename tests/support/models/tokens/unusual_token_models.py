"""Unusual ways to mix tokens: each must run exactly in token slices or be refused, never be silently wrong."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.models.tokens.token_models import VOCAB, WIDTH, Model, _heads, _joined, is_causal

INF = float("inf")


def _far(x):
    return torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])


def relative_bias(x, model):
    """A learned bias by distance, gathered from a table."""
    q, k, v = _heads(x, model)
    bias = model.weights.flatten()[_far(x).clamp(min=0)]
    scores = (q @ k.transpose(-2, -1) + bias).masked_fill(_far(x) < 0, -INF)
    return _joined(scores.softmax(-1) @ v)


def band(x, model):
    """A window of two triangles in which the first two tokens are always visible."""
    ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    seen = (ones.triu(-3) | (torch.arange(x.shape[1]) < 2)) & ones.tril()
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def complex_rotation(x, model):
    q, k, v = _heads(x, model)
    angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1])).to(x.dtype)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(t):
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    return _joined(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


def one_in_the_sum(x, model):
    """A written-out softmax with 1 added to the denominator."""
    q, k, v = _heads(x, model)
    weights = (q @ k.transpose(-2, -1)).exp() * (_far(x) >= 0)
    return _joined(weights / (1 + weights.sum(-1, keepdim=True)) @ v)


def sink_logit(x, model):
    """A softmax with one extra column of scores that is cut off again."""
    q, k, v = _heads(x, model)
    scores = (q @ k.transpose(-2, -1)).masked_fill(_far(x) < 0, -INF)
    sink = model.mix[:2].view(1, 2, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
    return _joined(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v)


def retention(x, model):
    q, k, v = _heads(x, model)
    decay = (torch.tensor([0.9, 0.7], dtype=x.dtype)[:, None, None] ** _far(x).clamp(min=0)).tril()
    return _joined((q @ k.transpose(-2, -1) * decay) @ v)


def outer_products(x, model):
    """Linear attention as a running sum of outer products, normalised by a running sum of keys."""
    q, k, v = model.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
    return torch.einsum("btd,btde->bte", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def dilated(x, model):
    """A dilated convolution of every second token, followed by another convolution."""
    made = F.conv1d(F.pad(x.transpose(1, 2), (4, 0)), model.conv.weight, dilation=2, groups=WIDTH)
    return F.conv1d(F.pad(torch.tanh(made), (2, 0)), model.conv.weight, groups=WIDTH).transpose(1, 2)


def buffered_mask(x, model):
    """A mask of the maximum length, cut to the sequence."""
    q, k, v = _heads(x, model)
    seen = torch.ones(32, 32).tril().view(1, 1, 32, 32)[:, :, : x.shape[1], : x.shape[1]]
    return _joined((q @ k.transpose(-2, -1)).masked_fill(seen == 0, -INF).softmax(-1) @ v)


def learned_window(x, model):
    """A window whose size depends on a parameter; the mask is causal for every value."""
    q, k, v = _heads(x, model)
    seen = (_far(x) < 3 + model.mix.exp().sum()) & (_far(x) >= 0)
    return _joined(torch.where(seen, q @ k.transpose(-2, -1), -INF).softmax(-1) @ v)


def mixed_by_linear(x, model):
    length = x.shape[1]
    return F.linear(x.transpose(1, 2), model.weights[:length, :length].tril()).transpose(1, 2)


def recomputed(x, model):
    return checkpoint(is_causal, x, model, use_reentrant=False)


def keys_without_gradient(x, model):
    q, k, v = _heads(x, model)
    return _joined(F.scaled_dot_product_attention(q, k.detach(), v, is_causal=True))


def written_in_place(x, model):
    """A shift by in-place assignment to a slice."""
    made = x * model.mix
    made[:, 1:] += x[:, :-1]
    return made


def ring(x, model):
    """A roll whose wrapped-around token is masked: causal, although the roll alone is not."""
    first = torch.arange(x.shape[1])[:, None] == 0
    return x * model.mix + x.roll(1, 1).masked_fill(first, 0.0)


def running_max(x, model):
    return x.cummax(1).values


def running_product(x, model):
    return torch.sigmoid(x).cumprod(1)


def running_logsumexp(x, model):
    return x.logcumsumexp(1)


def looked_up(x, model):
    """Every token gathers an earlier one."""
    places = (torch.arange(x.shape[1]) // 2)[None, :, None].expand(*x.shape)
    return x.gather(1, places)


def best_keys(x, model):
    """Attention to the three best earlier keys."""
    q, k, v = _heads(x, model)
    scores = (q @ k.transpose(-2, -1)).masked_fill(_far(x) < 0, -INF)
    least = scores.topk(3, -1).values[..., -1:]
    return _joined(scores.masked_fill(scores < least, -INF).softmax(-1) @ v)


def stable_softmax(x, model):
    """The maximum over all keys is subtracted before later keys are masked: the result is causal, but the op reads
    them.
    """
    q, k, v = _heads(x, model)
    scores = q @ k.transpose(-2, -1)
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp().tril()
    return _joined(weights / weights.sum(-1, keepdim=True) @ v)


def keys_first(x, model):
    """Scores computed as keys by queries."""
    q, k, v = _heads(x, model)
    scores = (k @ q.transpose(-2, -1)).masked_fill(_far(x) > 0, -INF)
    return _joined(scores.softmax(-2).transpose(-2, -1) @ v)


def transposed_scores(x, model):
    """Scores computed as keys by queries and transposed before use."""
    q, k, v = _heads(x, model)
    scores = (k @ q.transpose(-2, -1)).transpose(-2, -1).masked_fill(_far(x) < 0, -INF)
    return _joined(scores.softmax(-1) @ v)


def by_chunks(x, model):
    """Attention within chunks of three tokens."""
    q, k, v = (t.view(x.shape[0], -1, 3, WIDTH) for t in model.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(1, 2)


def windows(x, model):
    """Windows of three tokens made by unfold."""
    return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


def pictures(x, model):
    """A 2d convolution over tokens and features with padding in front."""
    return F.conv2d(F.pad(x[:, None], (1, 1, 2, 0)), model.weights[:3, :3][None, None])[:, 0]


def in_two_halves(x, model):
    """Attention within each half of the sequence."""
    half = x.shape[1] // 2
    return torch.cat([is_causal(x[:, :half], model), is_causal(x[:, half:], model)], 1)


EXACT = {
    f.__name__: f
    for f in (
        relative_bias, band, complex_rotation, one_in_the_sum, retention, outer_products, dilated, buffered_mask,
        learned_window, mixed_by_linear, recomputed, keys_without_gradient,
    )
}  # fmt: skip
CAUSAL_REFUSED = {
    f.__name__: f
    for f in (
        sink_logit, written_in_place, ring, running_max, running_product, running_logsumexp, looked_up, best_keys,
        stable_softmax, keys_first, transposed_scores, by_chunks, windows, pictures, in_two_halves,
    )
}  # fmt: skip


def prefix(x, model):
    """Causal attention in which the first three tokens see each other."""
    seen = (_far(x) >= 0) | (torch.arange(x.shape[1]) < 3)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def hidden_late(x, model):
    """Later keys are masked after the softmax and count in its denominator."""
    q, k, v = _heads(x, model)
    return _joined((q @ k.transpose(-2, -1)).softmax(-1).tril() @ v)


def both_normalised(x, model):
    """A layer norm over tokens and features."""
    return F.layer_norm(x, x.shape[1:])


def grouped_norm(x, model):
    return F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)


def instance_norm(x, model):
    return F.instance_norm(x.transpose(1, 2)).transpose(1, 2)


def pooled_window(x, model):
    return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


def resampled(x, model):
    return F.interpolate(x.transpose(1, 2), scale_factor=1.0, mode="linear").transpose(1, 2)


def total_of_sums(x, model):
    sums = x.cumsum(1)
    return sums / (1 + sums[:, -1:].square())


def without_gradient(x, model):
    return x * (x.detach().mean(1, keepdim=True) > 0)


def where_largest(x, model):
    return x * (torch.arange(x.shape[1])[None, :, None] == x.argmax(1, keepdim=True))


def fourier(x, model):
    return torch.fft.rfft(x, dim=1, norm="ortho").real.sum(1, keepdim=True) + x


def centred_pictures(x, model):
    return F.conv2d(x[:, None], model.weights[:3, :3][None, None], padding=1)[:, 0]


def keys_shifted_left(x, model):
    q, k, v = _heads(x, model)
    k, v = (F.pad(t, (0, 0, -1, 1)) for t in (k, v))
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def mean_over_keys(x, model):
    q, k, v = _heads(x, model)
    scores = (q @ k.transpose(-2, -1)).tril()
    return _joined((scores - scores.mean(-1, keepdim=True)).tril() @ v)


def transposed_triangle(x, model):
    q, k, v = _heads(x, model)
    return _joined((q @ k.transpose(-2, -1)).triu() @ v)


def sorted_by_norm(x, model):
    order = x.norm(dim=-1).argsort(1)
    return x.gather(1, order[..., None].expand_as(x))


def differences(x, model):
    return F.pad(x.diff(dim=1), (0, 0, 0, 1))


def linear_over_tokens(x, model):
    length = x.shape[1]
    return F.linear(x.transpose(1, 2), model.weights[:length, :length].triu()).transpose(1, 2)


def cut_bias(x, model):
    """A mask bias that a clamp makes too small."""
    bias = torch.full((x.shape[1], x.shape[1]), -INF, dtype=x.dtype).triu(1).clamp(min=-20.0)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=bias))


def scaled_mask(x, model):
    """A mask of -1e9 that is scaled to a small number afterwards."""
    q, k, v = _heads(x, model)
    scores = (q @ k.transpose(-2, -1)).masked_fill(_far(x) < 0, -1e9) * 1e-8
    return _joined(scores.softmax(-1) @ v)


def undone(x, model):
    """A bias for the first three tokens cancels the mask."""
    q, k, v = _heads(x, model)
    scores = q @ k.transpose(-2, -1) + (_far(x) < 0) * -1e9
    return _joined((scores + ((_far(x) < 0) & (torch.arange(x.shape[1]) < 3)) * 1e9).softmax(-1) @ v)


def undone_before(x, model):
    """A bias before the mask cancels it, with scaling."""
    q, k, v = _heads(x, model)
    scores = (q @ k.transpose(-2, -1) + (torch.arange(x.shape[1]) < 3) * 1e10) * 0.5
    return _joined((scores + torch.full((x.shape[1],) * 2, -1e9, dtype=x.dtype).triu(1)).softmax(-1) @ v)


UNUSUAL_LEAKS = {
    f.__name__: f
    for f in (
        prefix, hidden_late, both_normalised, grouped_norm, instance_norm, pooled_window, total_of_sums,
        without_gradient, where_largest, fourier, centred_pictures, keys_shifted_left, mean_over_keys,
        transposed_triangle, sorted_by_norm, differences, linear_over_tokens, cut_bias, scaled_mask, resampled, undone,
        undone_before,
    )
}  # fmt: skip


def marked(x, model, mask):
    """Later tokens marked 2 in the mask are visible."""
    q, k, v = _heads(x, model)
    seen = (_far(x) >= 0) | (mask == 2)[:, None, None, :]
    return _joined((q @ k.transpose(-2, -1)).masked_fill(~seen, -INF).softmax(-1) @ v)


def given_positions(x, model, mask):
    """The order of tokens comes from an input."""
    seen = mask[:, :, None] >= mask[:, None, :]
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen[:, None]))


def by_exclusive_or(x, model, mask):
    seen = ((_far(x) >= 0) ^ (mask == 2)[:, None, None, :]) | torch.eye(x.shape[1], dtype=torch.bool)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def scaled_bias(x, model, mask):
    """The mask bias is multiplied by an input, which may be 0."""
    bias = (_far(x) < 0) * -1e9 * mask[:, None, None, :].to(x.dtype)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=bias))


UNUSUAL_MASKED_LEAKS = {f.__name__: f for f in (marked, given_positions, by_exclusive_or, scaled_bias)}


class WithoutLast(Model):
    """A model that cuts off the last token before anything else."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        x = x + self.places[: x.shape[1]]
        for _ in range(self.layers):
            x = x + self.out(torch.tanh(self.mixer(x, self)))
        return F.cross_entropy(self.head(self.norm(x)).reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
