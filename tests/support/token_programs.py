"""Random causal programs over tokens, and random leaks to put into them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from support.token_models import CAUSAL, LEAKS, VOCAB, WIDTH, Model, _heads, _joined

Step = tuple[str, int, int]
TOKENS = 9
Op = Callable[[torch.Tensor, torch.Tensor, Model, int], torch.Tensor]


def _flat(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return torch.relu(m.out(x.reshape(-1, WIDTH))).view(*x.shape)


def _tokens_first(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return torch.tanh(m.out(x.transpose(0, 1).reshape(-1, WIDTH))).view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1)


def _halves(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([b, a * torch.sigmoid(b)], -1)


def _best(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    values, places = x.topk(2, -1)
    return torch.zeros_like(x).scatter(-1, places, values.softmax(-1))


def _windowed(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention to the last n + 1 tokens, with a bias that falls with the distance."""
    q, k, v = _heads(x, m)
    far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (far >= 0) & (far <= n)
    scores = (q @ k.transpose(-2, -1) - far * 0.1).masked_fill(~seen, float("-inf"))
    return _joined(scores.softmax(-1) @ v)


def _other_values(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Queries of one stream, keys and values of another."""
    q, (_, k, v) = _heads(x, m)[0], _heads(y, m)
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _grouped(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """One head of keys for all of queries."""
    q, k, v = _heads(x, m)
    k, v = (t[:, :1, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v))
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


TOKENWISE: dict[str, Op] = {
    "linear": lambda x, y, m, n: m.out(x),
    "norm": lambda x, y, m, n: m.norm(x),
    "gate": lambda x, y, m, n: torch.tanh(x) * torch.sigmoid(y),
    "features": lambda x, y, m, n: x.softmax(-1) * y.mean(-1, keepdim=True),
    "place": lambda x, y, m, n: x * (torch.arange(x.shape[1])[:, None] * 0.1 * (n + 1)).cos(),
    "flat": _flat,
    "tokens_first": _tokens_first,
    "halves": _halves,
    "best": _best,
    "windowed": _windowed,
    "other_values": _other_values,
    "grouped": _grouped,
}
GOOD: dict[str, Op] = TOKENWISE | {
    name: (lambda x, y, m, n, f=mixer: f(x, m)) for name, mixer in CAUSAL.items() if name != "padded_convolution"
}


def _cell(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """A single query sees a single later key."""
    q, k, v = _heads(x, m)
    length = x.shape[1]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    query = n % (length - 3)
    seen = (columns <= rows) | ((rows == query) & (columns == query + 1 + n % 2))
    return _joined((q @ k.transpose(-2, -1)).masked_fill(~seen, float("-inf")).softmax(-1) @ v)


def _some_later(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1 + n % 3)
    return _joined(F.scaled_dot_product_attention(*_heads(x, m), attn_mask=seen))


def _backwards(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1)


def _spread(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return x + m.out(y.sum(1, keepdim=True) * 0.1)


def _left(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return F.pad(x, (0, 0, -1 - n % 2, 1 + n % 2))


def _interleaved(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    return x.transpose(0, 1).reshape(x.shape)


LEAKY: dict[str, Op] = {
    "cell": _cell, "some_later": _some_later, "backwards": _backwards, "spread": _spread, "left": _left,
    "interleaved": _interleaved,
    **{name: (lambda x, y, m, n, f=mixer: f(x, m)) for name, mixer in LEAKS.items() if name != "one_cell"},
}  # fmt: skip


class Program(Model):
    """Each step adds what an op makes of two earlier values to the last one, so that every step reaches the loss."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__(lambda x, m: x)
        self.steps = steps
        self.double().train()

    def __repr__(self) -> str:
        return f"Program({self.steps!r})"

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        values = [self.embedding(ids) + self.places[: ids.shape[1]]]
        for name, other, number in self.steps:
            op = (GOOD | LEAKY)[name]
            made = op(values[-1], values[other % len(values)], self, number)
            values.append(values[-1] + torch.tanh(made) * 0.5)
        logits = self.head(self.norm(values[-1]))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


_numbers = st.tuples(st.integers(0, 6), st.integers(0, 6))


def programs(most: int = 6) -> st.SearchStrategy[tuple[Step, ...]]:
    step = st.tuples(st.sampled_from(sorted(GOOD)), _numbers).map(lambda s: (s[0], *s[1]))
    return st.lists(step, min_size=1, max_size=most).map(tuple)


@st.composite
def leaky(draw: st.DrawFn) -> tuple[Step, ...]:
    """A causal program with one leak somewhere in it."""
    steps = list(draw(programs(most=3)))
    leak = (draw(st.sampled_from(sorted(LEAKY))), *draw(_numbers))
    steps.insert(draw(st.integers(0, len(steps))), leak)
    return tuple(steps)


def batch_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, 2:4] = -100
    return {"ids": ids, "labels": labels}
