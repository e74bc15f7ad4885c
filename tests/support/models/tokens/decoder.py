"""A small causal decoder with the options that interact with token slices: grouped heads, window, dropout, loss
terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from support.models.small_models import Small

VOCAB, WIDTH, HEADS, SEQ = 23, 16, 4, 16
_SIZE = WIDTH // HEADS


@dataclass(frozen=True)
class Shape:
    """The options of a decoder.

    groups: key heads of a layer; window: number of tokens that a token attends to, None for all earlier ones;
    written_out: attention as matrix products; term: add a loss term that is a mean over all tokens, with or without
    label; merged: layers pass on values with tokens and rows on one axis, grouped by token.
    """

    layers: int = 3
    groups: int = 2
    window: int | None = None
    dropout: float = 0.0
    written_out: bool = False
    term: bool = False
    merged: bool = False


class Layer(nn.Module):
    """Attention and an MLP, each with a norm and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, _SIZE * shape.groups) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        shape, p = self.shape, self.shape.dropout if self.training else 0.0
        q = self.query(x).unflatten(-1, (HEADS, _SIZE)).transpose(1, 2)
        k, v = (
            part(x).unflatten(-1, (shape.groups, _SIZE)).transpose(1, 2).repeat_interleave(HEADS // shape.groups, 1)
            for part in (self.key, self.value)
        )
        if not shape.written_out:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)
        scores = (q @ k.transpose(-2, -1) / _SIZE**0.5).masked_fill(~seen, float("-inf"))
        return F.dropout(scores.softmax(-1), p) @ v

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        p, training = self.shape.dropout, self.training
        x = x + F.dropout(self.out(self.attend(self.norms[0](x), seen).transpose(1, 2).flatten(2)), p, training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), p, training)


class Decoder(nn.Module):
    """A decoder that takes ids and labels (-100 is ignored) and returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1])
        seen = place[None, :] <= place[:, None]
        if self.shape.window is not None:
            seen = seen & (place[None, :] > place[:, None] - self.shape.window)
        x = self.embedding(ids) + self.places(place)
        for layer in self.layers:
            x = layer(x, seen)
            if self.shape.merged:
                x = torch.tanh(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (ids.shape[1], -1)).transpose(0, 1)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
        return loss + 0.3 * logits.logsumexp(-1).square().mean() if self.shape.term else loss


def text(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch whose rows end with different numbers of unlabelled tokens."""
    ids = torch.randint(0, VOCAB, (rows, SEQ), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    for row in range(rows):
        labels[row, SEQ - 3 * row % (SEQ - 2) :] = -100
    return {"ids": ids, "labels": labels}


def decoder(shape: Shape) -> Any:
    """Return the model and its batches as a `Small`."""
    return Small(lambda: Decoder(shape), text)
