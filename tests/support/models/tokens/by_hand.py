"""A transformer written by hand, with one product for queries, keys and values."""

from __future__ import annotations

import torch
from torch import nn


class Gpt(nn.Module):
    """Two blocks with one product for queries, keys and values, written by hand; its logits are those of its words."""

    def __init__(self, width: int = 16, heads: int = 4, words: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(8, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places
        rows, tokens, width = x.shape
        for n in range(2):
            parts = self.qkv[n](self.norms[2 * n](x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind(0)
            scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
            x = x + self.drop(self.out[n]((self.drop(scores) @ v).transpose(1, 2).reshape(rows, tokens, width)))
            x = x + self.down[n](nn.functional.gelu(self.up[n](self.norms[2 * n + 1](x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1)
