"""A VGG-like and a GPT-like model with data that they can learn, up to noise that keeps their losses above 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, IMAGE, VOCAB, SEQ, WIDTH = 8, 8, 16, 12, 32
Batch = tuple[torch.Tensor, torch.Tensor]


def vgg() -> nn.Module:
    """Convolutions with batch norm, pooling, then linear layers with dropout."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(16 * 4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """Token and position embeddings, four blocks, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the targets that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def images(rows: int, seed: int = 1) -> Iterator[Batch]:
    """A pattern for each class under noise; one label of five is random."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, IMAGE, IMAGE, generator=generator)
    generator.manual_seed(seed)
    while True:
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        x = patterns[labels] + torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)
        noisy = torch.randint(CLASSES, (rows,), generator=generator)
        yield x, torch.where(torch.rand(rows, generator=generator) < 0.2, noisy, labels)


def texts(rows: int, seed: int = 1) -> Iterator[Batch]:
    """Each token follows from the one before it in three cases of four; one target of ten is ignored."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randperm(VOCAB, generator=generator)
    generator.manual_seed(seed)
    while True:
        drawn = torch.randint(VOCAB, (rows, SEQ + 1), generator=generator)
        follows = torch.rand(rows, SEQ + 1, generator=generator) < 0.75
        for place in range(1, SEQ + 1):
            drawn[:, place] = torch.where(follows[:, place], following[drawn[:, place - 1]], drawn[:, place])
        ignored = torch.rand(rows, SEQ, generator=generator) < 0.1
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].masked_fill(ignored, -100)


LEARNERS = {"vgg": (vgg, images, F.cross_entropy), "gpt": (gpt, texts, token_loss)}
"""By name: the model, its batches and its loss."""
