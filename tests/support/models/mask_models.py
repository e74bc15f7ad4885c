"""Models that build attention masks in forward(): causal masks, and masks of sequences packed into one row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.models.misleading_models import Script

WORDS, LENGTH, WIDTH = 20, 6, 8


class Encoder(nn.Module):
    """The encoder of torch's tutorial: sequence first, with a causal mask made from the length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(hidden), dtype=hidden.dtype)
        hidden = self.encoder(hidden, mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words.t().flatten())


class Translator(Encoder):
    """nn.Transformer with padding in the source and a target mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, WIDTH, dropout=0.0, batch_first=True)
        self.register_buffer("causal", torch.triu(torch.ones(LENGTH, LENGTH), 1).bool())
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        given = self.embed(words)
        padding = torch.cat([torch.zeros_like(words[:, :1]), words[:, 1:]], 1) == 3
        hidden = self.transformer(given, given, tgt_mask=self.causal, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


class Packed(Encoder):
    """A model that finds the packed sequences of a row from restarting positions, as transformers does."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(words.shape[1]).remainder(4).unsqueeze(0).expand(len(words), -1)
        number = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        same = number[:, :, None] == number[:, None, :]
        hidden = self.embed(words)
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=same)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def words(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


MASKED = {
    "an encoder with a causal mask, sequence first": Script(Encoder, (words(5),), micros=2),
    "a transformer with masks": Script(Translator, (words(5),), micros=2),
    "packed sequences": Script(Packed, (words(5),), micros=2),
}
