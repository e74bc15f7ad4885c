"""Small models of kinds that real code has, exact on the ranks of a shard group."""

from __future__ import annotations

import pytest
import torch
from support.extending.shards_in_process import captured_at, drawn, errors, run_whole
from torch import nn

from autopart.passes.shards.choice import choose

EXACT = 1e-10
F = nn.functional
WIDTH, HEADS, WORDS = 16, 4, 24


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Diagonals(nn.Module):
    """Letters that stand twice in one tensor: a diagonal, and a trace, of which no rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)
        self.square = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = torch.tanh(self.up(normed(x)))
        pairs = torch.einsum("bsd,bse->bde", u, u)
        x = x + self.down(u * torch.einsum("dd->d", self.square)) + torch.einsum("ee->", self.square)
        return x + self.out(torch.einsum("bdd->bd", pairs))[:, None] + torch.einsum("bdd->b", pairs)[:, None, None]


class Rotated(nn.Module):
    """Heads made and joined by einsum, turned as complex numbers, with a learned slope for each and a soft cap."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, size)) for _ in range(3))
        self.out, self.slopes = nn.Parameter(torch.randn(HEADS, size, WIDTH)), nn.Parameter(torch.rand(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(x.shape[1])
        angles = torch.outer(tokens.double(), torch.tensor([1.0, 0.1], dtype=torch.double))
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k, v = (torch.einsum("bsd,dhe->bhse", normed(x), weight) for weight in (self.q, self.k, self.v))
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        scores = 5 * torch.tanh(torch.einsum("bhse,bhte->bhst", q, k) / 5)
        scores = scores + self.slopes * (tokens - tokens[:, None])
        found = scores.masked_fill(tokens > tokens[:, None], -torch.inf).softmax(-1)
        return x + torch.einsum("bhst,bhte,hed->bsd", found, v, self.out)


class Mixing(nn.Module):
    """Heads that are mixed, averaged and weighed against each other, and hidden axes that are summed and sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH * HEADS), nn.Linear(WIDTH, WIDTH)
        self.talk, self.up, self.down = nn.Parameter(torch.randn(HEADS, HEADS)), nn.Linear(WIDTH, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(normed(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v = self.v(normed(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        found = (q @ q.mT).softmax(-1)
        x = x + self.out((found @ v).mean(1)) + torch.einsum("hg,bgst,bhtd->bsd", self.talk, found, v)
        x = x + (q.square().sum(-1).softmax(1)[..., None] * v).sum(1)
        u = torch.tanh(self.up(normed(x)))
        x = x + self.down(u * u.mean(-1, keepdim=True) + u.sum(-1, keepdim=True)) + self.down(u).cumsum(1)
        w = self.up(x)
        return (
            x
            + self.down(w.relu().cumsum(-1))
            + w.topk(5, -1).values.sum(-1, keepdim=True)
            + w.sort(-1).values[..., :16]
        )


class Views(nn.Module):
    """Heads behind the entries of a head, thirds behind both, a shuffled hidden axis, and one beside the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(normed(x)).view(rows, tokens, -1, HEADS, 3).unbind(-1)
        q, k, v = (t.permute(0, 3, 1, 2) for t in (q, k, v))
        found = (q @ k.mT).softmax(-1) @ v
        x = x + self.out(found.permute(0, 2, 3, 1).reshape(x.shape)) + self.out(found.transpose(1, 2).reshape(x.shape))
        shuffled = self.up(normed(x)).view(rows, tokens, 4, 8).mT.reshape(rows, tokens, 32)
        return (
            x + self.down(F.gelu(shuffled)) + self.down(F.silu(self.up(x).reshape(rows, -1, 8)).reshape(shuffled.shape))
        )


class Routed(nn.Module):
    """Experts whose results are added at indices, a stop of gradients, and a prefix that is cut off again."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.prefix = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(1, 2, WIDTH))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.prefix.expand(len(x), -1, -1), x), 1)
        h = normed(x).flatten(0, 1)
        share, chosen = self.router(h).softmax(-1).topk(2, -1)
        found = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            weight = (share * (chosen == number)).sum(-1, keepdim=True)
            found = found.index_add(0, torch.arange(len(h)), weight * expert(h))
        return (x + found.view_as(x) * (1 + x.detach().abs()))[:, 2:]


class Model(nn.Module):
    """Words, two blocks, a hidden axis, and a head that shares the table of words: capped, smoothed, with a loss on
    normalisers."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.ModuleList(block() for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * 4
        for block in self.blocks:
            x = block(x)
        x = x + self.down(F.gelu(self.up(normed(x))))
        logits = 3 * torch.tanh(normed(x) @ self.words.weight.t() / 3)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, label_smoothing=0.1)
        return loss + 0.01 * logits.logsumexp(-1).square().mean()


BLOCKS = [Diagonals, *(pytest.param(each, marks=pytest.mark.slow) for each in (Rotated, Mixing, Views, Routed))]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_model_is_exact_under_the_rule_and_under_any_legal_assignment(
    block: type[nn.Module], request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (2, 8))
    labels = ids.roll(-1, 1)
    labels[:, 2:5] = -1
    captured, inputs = captured_at(Model(block).double(), (ids, labels))
    expected = run_whole(captured, inputs)
    for shards, sequence in ((2, True), (2, False)):
        found = choose(captured.graph, shards, sequence=sequence)
        assert errors(captured, inputs, found, expected=expected) < EXACT
    for seed in range(2 if block is Diagonals else 40):
        assert errors(captured, inputs, drawn(captured.graph, 2, seed), expected=expected) < EXACT, seed
