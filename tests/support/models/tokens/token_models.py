"""Small causal models, and mixers and losses in which a token can see a later one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, SEQ = 17, 8, 12
Mixer = Callable[[torch.Tensor, "Model"], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, "Model"], torch.Tensor]


def shifted(logits, labels, model):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


class Model(nn.Module):
    """Embedding, token mixer, MLP and head; forward() shifts the logits against the labels."""

    def __init__(self, mixer: Mixer, layers: int = 1, loss: Loss | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mixer, self.layers, self.loss = mixer, layers, loss or shifted
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(32, WIDTH) * 0.1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.padded = nn.Conv1d(WIDTH, WIDTH, 4, padding=3)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.mix = nn.Parameter(torch.full((WIDTH,), 0.4))
        self.weights = nn.Parameter(torch.randn(32, 32) * 0.3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        self_mask = mask
        for _ in range(self.layers):
            mixed = self.mixer(x, self) if self_mask is None else self.mixer(x, self, self_mask)  # type: ignore[call-arg]
            x = x + self.out(torch.tanh(mixed))
        logits = self.head(self.norm(x))
        return self.loss(logits, labels, self)


def _heads(x: torch.Tensor, model: Model) -> tuple[torch.Tensor, ...]:
    q, k, v = model.qkv(x).chunk(3, -1)
    return tuple(t.view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2) for t in (q, k, v))


def _joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def tril_softmax(x, model):
    q, k, v = _heads(x, model)
    scores = q @ k.transpose(-2, -1) / 2
    hidden = torch.tril(torch.ones(x.shape[1], x.shape[1])) == 0
    return _joined(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)


class MaskBuffer(Model):
    """Attention written out, under a mask and with places in tables of `length` tokens."""

    def __init__(self, length: int, layers: int = 1) -> None:
        super().__init__(self.attend, layers)
        self.places = nn.Parameter(self.places[:length].detach().clone())
        self.register_buffer("seen", torch.ones(length, length).tril().view(1, 1, length, length))

    @staticmethod
    def attend(x: torch.Tensor, model: Model) -> torch.Tensor:
        (q, k, v), count = _heads(x, model), x.shape[1]
        hidden = model.seen[:, :, :count, :count] == 0
        return _joined((q @ k.transpose(-2, -1) / 2).masked_fill(hidden, float("-inf")).softmax(-1) @ v)


def softmax_by_hand(x, model):
    q, k, v = _heads(x, model)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return _joined(weights / weights.sum(-1, keepdim=True) @ v)


def _exp_of_scores(x, model, ahead):
    """Attention as exp of masked scores divided by their sum, which shows `ahead` later tokens."""
    q, k, v = _heads(x, model)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1 + ahead)
    weights = torch.exp((q @ k.transpose(-2, -1) / 2).masked_fill(hidden, float("-inf")))
    return _joined(weights / weights.sum(-1, keepdim=True) @ v)


def exp_of_scores(x, model):
    return _exp_of_scores(x, model, 0)


def exp_of_later_scores(x, model):
    return _exp_of_scores(x, model, 1)


def is_causal(x, model):
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), is_causal=True))


def einsum_attention(x, model):
    q, k, v = model.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).unbind(2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    bias = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", (scores + bias).softmax(-1), v).flatten(2)


def linear_attention(x, model):
    q, k, v = _heads(x, model)
    return _joined((q @ k.transpose(-2, -1)).tril() @ v)


def causal_convolution(x, model):
    return model.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


def padded_convolution(x, model):
    return model.padded(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def shift_by_padding(x, model):
    return torch.lerp(x, F.pad(x, (0, 0, 1, -1)), model.mix)


def shift_by_cat(x, model):
    return x * model.mix + torch.cat([torch.zeros_like(x[:, :2]), x[:, :-2]], 1)


def shift_by_slice(x, model):
    return x * model.mix + F.pad(x, (0, 0, 1, 0))[:, :-1]


def shift_by_padding_the_rest(x, model):
    return x * model.mix + F.pad(x[:, :-2], (0, 0, 2, 0))


def running_mean(x, model):
    counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    return x.cumsum(1) / counts * model.mix


def mixing_weights(x, model):
    length = x.shape[1]
    return model.weights[:length, :length].tril() @ x


def forgetting(x, model):
    """Attention scores with a decay that depends on both tokens."""
    q, k, v = _heads(x, model)
    gate = F.logsigmoid(x @ model.out.weight[:, :2]).cumsum(1).transpose(1, 2)
    scores = q @ k.transpose(-2, -1) + gate.unsqueeze(-1) - gate.unsqueeze(-2)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return _joined(torch.where(seen, scores, float("-inf")).softmax(-1) @ v)


def with_padding(x, model, mask):
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask[:, None, None, :].bool()
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def packed(x, model, mask):
    """Attention within documents. mask: the document number of every token."""
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    seen = seen & (mask[:, :, None] == mask[:, None, :])
    scores = torch.where(seen[:, None], 0.0, torch.finfo(torch.float32).min).to(x.dtype)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=scores))


CAUSAL = {
    f.__name__: f
    for f in (
        tril_softmax, softmax_by_hand, exp_of_scores, is_causal, einsum_attention, linear_attention, causal_convolution,
        padded_convolution, shift_by_padding, shift_by_cat, shift_by_slice, shift_by_padding_the_rest, running_mean,
        mixing_weights, forgetting,
    )
}  # fmt: skip
MASKED = {f.__name__: f for f in (with_padding, packed)}


def all_tokens(x, model):
    return _joined(F.scaled_dot_product_attention(*_heads(x, model)))


def one_later(x, model):
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def one_cell(x, model):
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    seen = seen | (torch.arange(x.shape[1]) == 7) & (torch.arange(x.shape[1]) == 6)[:, None]
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def little_bias(x, model):
    bias = torch.full((x.shape[1], x.shape[1]), -30.0, dtype=x.dtype).triu(1)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=bias))


def prefix_mask(x, model, mask):
    """Causal attention in which tokens marked 2 in the mask are visible to all."""
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() | (mask[:, None, None, :] == 2)
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), attn_mask=seen))


def softmax_of_queries(x, model):
    q, k, v = _heads(x, model)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return _joined((q @ k.transpose(-2, -1)).masked_fill(~seen, float("-inf")).softmax(-2) @ v)


def late_mask(x, model):
    q, k, v = _heads(x, model)
    return _joined((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def flipped(x, model):
    return x.flip(1)


def pooled(x, model):
    return x - x.mean(1, keepdim=True)


def largest(x, model):
    return x * x.amax(1, keepdim=True)


def next_token(x, model):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def rolled(x, model):
    return x.roll(1, 1)


def centred_convolution(x, model):
    return F.conv1d(x.transpose(1, 2), model.conv.weight, padding=1, groups=WIDTH).transpose(1, 2)


def norm_of_tokens(x, model):
    return model.batch_norm(x.transpose(1, 2)).transpose(1, 2)


def sorted_tokens(x, model):
    return x.sort(1).values


def first_token(x, model):
    return x * x[:, :1]


def global_state(x, model):
    q, k, v = _heads(x, model)
    return _joined(q @ (k.transpose(-2, -1) @ v))


LEAKS = {
    f.__name__: f
    for f in (
        all_tokens, one_later, one_cell, little_bias, softmax_of_queries, late_mask, flipped, pooled, largest,
        next_token, rolled, centred_convolution, norm_of_tokens, sorted_tokens, first_token, global_state,
        exp_of_later_scores,
    )
}  # fmt: skip
MASKED_LEAKS = {"prefix_mask": prefix_mask}


def token_batch(rows: int = 2, *, mask: str = "") -> dict[str, torch.Tensor]:
    """Return a batch.

    mask: "" for none, "padding" at the end of the last row, "documents" for document numbers of every token.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=generator)
    labels = ids.clone()
    labels[0, 2:4] = -100
    batch = {"ids": ids, "labels": labels}
    if mask == "padding":
        batch["mask"] = torch.ones(rows, SEQ, dtype=torch.long)
        batch["mask"][-1, -3:] = 0
        labels[-1, -3:] = -100
    if mask == "documents":
        batch["mask"] = torch.tensor([[1] * 5 + [2] * (SEQ - 5), [1] * 9 + [3] * (SEQ - 9)] * rows)[:rows]
    return batch


def dropped(x, model):
    """Attention with dropout on its inputs and probabilities."""
    q, k, v = _heads(F.dropout(x, 0.3), model)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    probabilities = (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf")).softmax(-1)
    return _joined(F.dropout(probabilities, 0.4) @ v)


def dropped_weights(x, model):
    """Dropout of a value without tokens, which every slice must draw alike, and noise over all tokens."""
    noise = torch.rand(x.shape[1], 1, dtype=x.dtype)
    return is_causal(x * F.dropout(model.mix, 0.3) + noise, model)


def dropped_inside(x, model):
    return _joined(F.scaled_dot_product_attention(*_heads(x, model), is_causal=True, dropout_p=0.3))


def _next(labels):
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def smoothed(logits, labels, model):
    return F.cross_entropy(logits.transpose(1, 2), _next(labels), label_smoothing=0.1)


def weighed_classes(logits, labels, model):
    weights = torch.arange(1, VOCAB + 1, dtype=logits.dtype)
    return F.cross_entropy(logits.reshape(-1, VOCAB), _next(labels).reshape(-1), weight=weights)


def masked_mean(logits, labels, model):
    target = _next(labels)
    each = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    counts = (target != -100).to(logits.dtype)
    return (each * counts).sum() / counts.sum()


def mean_of_rows(logits, labels, model):
    return F.cross_entropy(logits.transpose(1, 2), _next(labels).clamp(min=0), reduction="none").mean(1).mean()


def squares(logits, labels, model):
    return 0.5 * F.mse_loss(logits, F.one_hot(labels.clamp(min=0), VOCAB).to(logits.dtype))


def two_terms(logits, labels, model):
    """A loss with a term over the logits of every token and one over the weights."""
    return shifted(logits, labels, model) + 0.01 * logits.logsumexp(-1).square().mean() + model.mix.square().sum()


def of_running_sums(logits, labels, model):
    """A loss over running sums that leaves out the last two tokens, so that slices of one token may have no term."""
    return F.cross_entropy(logits[:, :-2].cumsum(1).reshape(-1, VOCAB), labels[:, 2:].reshape(-1))


LOSSES = {
    f.__name__: f for f in (smoothed, weighed_classes, masked_mean, mean_of_rows, squares, two_terms, of_running_sums)
}


def perplexity(logits, labels, model):
    return shifted(logits, labels, model).exp()


def over_all(logits, labels, model):
    return logits.logsumexp((1, 2)).mean()


LOSS_LEAKS = {"perplexity": perplexity, "over_all": over_all}
