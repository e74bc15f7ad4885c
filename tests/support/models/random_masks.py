"""Random attention masks in all the ways in which models make them, in a model of one attention layer."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

ROWS, TOKENS, HEADS, WIDTH, WORDS = 4, 6, 2, 8, 11
KINDS = (
    *("all", "triangle", "shifted", "window", "long window", "prefix", "packed", "one document"),
    *("one hidden key", "hidden row", "padding", "no padding", "triangle and padding", "triangle and no padding"),
)
SOURCES = ("constant", "input", "computed")
FORMS = ("bool", "-inf", "minimum", "-1e4")


def shown(kind: str, draw: random.Random) -> torch.Tensor:
    """Return which key each query sees, (rows, 1, queries, keys)."""
    row, column = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
    every = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool)
    earlier, padded = column <= row, every.clone()
    padded[draw.randrange(ROWS), :, :, TOKENS - draw.randint(1, 2) :] = False
    found = {
        "triangle": earlier,
        "shifted": column <= row + draw.choice((-1, 1, 2)),
        "window": earlier & (column > row - 3),
        "long window": earlier & (column > row - TOKENS),
        "prefix": earlier | (column < draw.randint(2, TOKENS - 1)),
        "packed": earlier & ((row < 3) == (column < 3)),
        "one document": earlier & (row < TOKENS + column),
        "padding": padded,
        "triangle and padding": earlier & padded,
        "triangle and no padding": earlier & every,
    }.get(kind, every)
    found = (found & every).clone()
    if kind == "one hidden key":
        found[draw.randrange(ROWS), 0, draw.randrange(TOKENS), draw.randrange(TOKENS)] = False
    if kind == "hidden row":
        found[draw.randrange(ROWS), 0, draw.randrange(TOKENS)] = False
    return found


class Masked(nn.Module):
    """Attention whose mask is a constant of forward(), an input, or computed of an input of (rows, keys).

    source: one of `SOURCES`, or "parameter".  form: one of `FORMS`: the number that hides a key.  shape: of the mask:
    "full", "rows" (no axis of heads), "heads" (an axis of all heads).
    """

    def __init__(self, mask: torch.Tensor, source: str, form: str, shape: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS)) if source == "parameter" else None
        self.double()
        self._rows = mask[0, 0].tolist()
        self._source, self._form, self._shape = source, form, shape

    def mask(self, given: torch.Tensor) -> torch.Tensor:
        """Return the mask that attention gets."""
        shown = given.bool()
        if self._source == "constant":
            shown = torch.tensor(self._rows).expand(given.shape[0], 1, TOKENS, TOKENS)
        elif given.dim() == 2:
            shown = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & shown[:, None, None, :]
        if self._shape == "heads":
            shown = shown.expand(-1, HEADS, -1, -1)
        if self._form == "bool" and self.bias is None:
            return shown
        lowest = {"-inf": -torch.inf, "-1e4": -1e4}.get(self._form, torch.finfo(torch.float64).min)
        hidden = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, lowest)
        return hidden if self.bias is None else hidden + self.bias

    def forward(self, ids: torch.Tensor, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        hidden = self.words(ids)
        query, key, value = (
            layer(hidden).reshape(-1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in self.heads
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(given))
        logits = self.last(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def batch(given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a batch with these numbers for the mask."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, WORDS, (ROWS, TOKENS), generator=generator) for _ in range(2))
    return {"ids": ids, "given": given, "labels": labels}
