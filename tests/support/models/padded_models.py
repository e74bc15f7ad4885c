"""Small models that read sequences of several lengths: some have the same loss for padded ones, others do not."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH = 23, 8


class Causal(nn.Module):
    """Predicts the next token, as in a GPT by hand; dropout may be on.  `mix` is what mixes the tokens."""

    def __init__(self, mix: Callable[[Causal, torch.Tensor], torch.Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.three, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm, self.rate, self.mix = nn.BatchNorm1d(WIDTH), dropout, mix or causal

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        x = F.dropout(x + self.mix(self, x), self.rate, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def attention(self, x: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        q, k, v = self.three(x).split(WIDTH, dim=-1)
        rate = self.rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, dropout_p=rate)


def causal(model: Causal, x: torch.Tensor) -> torch.Tensor:
    return model.attention(x, is_causal=True)


def unmasked(model: Causal, x: torch.Tensor) -> torch.Tensor:
    return model.attention(x, is_causal=False)


def pooled(model: Causal, x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=1, keepdim=True)


def normed(model: Causal, x: torch.Tensor) -> torch.Tensor:
    return model.norm(x.flatten(0, 1)).view_as(x)


class EveryToken(Causal):
    """Counts every token in its loss, whatever the label is."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(idx)
        return (self.head(x).logsumexp(-1) * (targets != 0)).mean()


class Masked(nn.Module):
    """Attends to all tokens that a mask shows, and takes None for no mask; as in a BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.three = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.config = types.SimpleNamespace(pad_token_id=3)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = self.three(self.words(input_ids)).split(WIDTH, dim=-1)
        mask = None if attention_mask is None else attention_mask[:, None, :].bool()
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert labels is not None
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class TwoSided(nn.Module):
    """Reads a source and a target of another length, as a T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.config = types.SimpleNamespace(pad_token_id=0, is_encoder_decoder=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, target = self.words(input_ids), self.words(labels.clamp(min=0))
        seen = F.scaled_dot_product_attention(target, source, source, attn_mask=attention_mask[:, None, :].bool())
        return F.cross_entropy(self.head(seen).flatten(0, 1), labels.flatten())


def tokens(length: int, rows: int = 4, seed: int = 0) -> torch.Tensor:
    """Return rows of tokens, different for each length."""
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(100 * seed + length))
