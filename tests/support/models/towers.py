"""Deep and narrow models of five families, whose layers freeze one after the other; each returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, VOCAB, TOKENS = 16, 2, 40, 8
Batch = tuple[torch.Tensor, ...]


class Attention(nn.Module):
    def __init__(self, p: float, *, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.p, self.causal = p, causal

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(t.shape[0], t.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A layer of a transformer.  post: whether norms follow the sums, as in BERT.  cross: whether it reads a memory."""

    def __init__(self, p: float, *, post: bool = False, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in ("own", "mlp", *["cross"] * cross)})
        self.own = Attention(p, causal=causal)
        self.cross = Attention(p) if cross else None
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(p))
        self.post = post

    def add(self, name: str, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        norm = self.norms[name]
        return norm(x + change(x)) if self.post else x + change(norm(x))

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.add("own", x, lambda y: self.own(y, y, mask))
        if self.cross is not None and memory is not None:
            cross = self.cross
            x = self.add("cross", x, lambda y: cross(y, memory))
        return self.add("mlp", x, self.mlp)


class Vit(nn.Module):
    def __init__(self, depth: int, p: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.layers = nn.ModuleList(Block(p) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)


class Bert(nn.Module):
    def __init__(self, depth: int, p: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.layers = nn.ModuleList(Block(p, post=True) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x, None, mask[:, None, None, :])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Gpt(nn.Module):
    def __init__(self, depth: int, p: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(p)
        self.layers = nn.ModuleList(Block(p, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class T5(nn.Module):
    def __init__(self, depth: int, p: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block(p) for _ in range(depth // 2))
        self.decoder = nn.ModuleList(Block(p, causal=True, cross=True) for _ in range(depth - depth // 2))
        self.encoded, self.decoded = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, y = self.words(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoded(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return F.cross_entropy(self.head(self.decoded(y))[:, :-1].flatten(0, 1), target[:, 1:].flatten())


class Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (y + self.skip(x)).relu()


class Resnet(nn.Module):
    def __init__(self, depth: int, p: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        half = depth // 2
        sizes = [(4, 4, 1)] * half + [(4, 8, 2)] + [(8, 8, 1)] * (depth - half - 1)
        self.layers = nn.ModuleList(Basic(*size) for size in sizes)
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels).relu()
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class Family:
    """A family of models.  coupled: whether batch statistics couple the rows of a micro-batch."""

    make: Callable[[int, float], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    coupled: bool = False

    def model(self, depth: int, p: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """Return the model with the same weights at every call."""
        torch.manual_seed(7)
        return self.make(depth, p).to(dtype)

    def data(self, rows: int, step: int, dtype: torch.dtype = torch.float64) -> Batch:
        """Return the batch of a step."""
        made = self.batch(rows, torch.Generator().manual_seed(step))
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in made)


def _images(rows: int, draw: torch.Generator) -> Batch:
    return torch.randn(rows, 3, 8, 8, generator=draw), torch.randint(0, 5, (rows,), generator=draw)


def _tokens(rows: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, TOKENS), generator=draw)


def _masked(rows: int, draw: torch.Generator) -> Batch:
    ids, seen = _tokens(rows, draw), torch.arange(TOKENS)[None, :] < TOKENS - torch.arange(rows)[:, None] % 3
    labels = ids.where((torch.rand(rows, TOKENS, generator=draw) < 0.4) & seen, -100)
    labels[:, 0] = ids[:, 0]
    return ids, seen, labels


FAMILIES = {
    "vit": Family(Vit, _images),
    "bert": Family(Bert, _masked),
    "gpt": Family(Gpt, lambda rows, draw: (_tokens(rows, draw),)),
    "t5": Family(T5, lambda rows, draw: (_tokens(rows, draw), _tokens(rows, draw))),
    "resnet": Family(Resnet, _images, coupled=True),
}
