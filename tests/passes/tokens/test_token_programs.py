"""Random causal programs, cut at random, equal the whole sequence; with one leak anywhere in them they are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from support.models.tokens.token_models import CAUSAL, LEAKS, VOCAB, WIDTH, Model, _heads, _joined
from support.models.tokens.unusual_token_models import EXACT, UNUSUAL_LEAKS, UNUSUAL_MASKED_LEAKS
from support.oracles.sliced import analysed, future_shows, inputs_of, judged, run_sliced, unsliced, worst_error
from torch.nn import functional as F

from autopart.ir.errors import RefusedError
from autopart.passes.tokens.recipe import Recipe

Step = tuple[str, int, int]
Steps = tuple[Step, ...]
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
    """Attention to the last n + 1 tokens with a bias that decreases with distance."""
    q, k, v = _heads(x, m)
    far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (far >= 0) & (far <= n)
    scores = (q @ k.transpose(-2, -1) - far * 0.1).masked_fill(~seen, float("-inf"))
    return _joined(scores.softmax(-1) @ v)


def _other_values(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention with queries of one stream and keys and values of another."""
    q, (_, k, v) = _heads(x, m)[0], _heads(y, m)
    return _joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _grouped(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention with one key head for all query heads."""
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


def _padding(x: torch.Tensor, ids: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention in which tokens with the id n are hidden from later ones."""
    own = torch.eye(x.shape[1], dtype=torch.bool)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & (ids != n)[:, None, None, :] | own
    return _joined(F.scaled_dot_product_attention(*_heads(x, m), attn_mask=seen))


def _documents(x: torch.Tensor, ids: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention within documents, which end with a token of id n."""
    q, k, v = _heads(x, m)
    document = (ids == n).cumsum(1)
    seen = (document[:, :, None] == document[:, None, :])[:, None]
    seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return _joined((q @ k.transpose(-2, -1)).masked_fill(~seen, torch.finfo(x.dtype).min).softmax(-1) @ v)


GOOD_BY_IDS: dict[str, Op] = {"padding": _padding, "documents": _documents}
"""Ops whose second operand is the token ids, as for `LEAKY_BY_IDS`."""
_SLOW_TO_CAPTURE = ("complex_rotation", "recomputed", "norm_of_tokens", "fourier")
"""Ops that make the capture of a whole model slow; separate tests cover them."""
GOOD: dict[str, Op] = (
    TOKENWISE
    | GOOD_BY_IDS
    | {
        name: (lambda x, y, m, n, f=mixer: f(x, m))
        for name, mixer in (CAUSAL | EXACT).items()
        if name not in ("padded_convolution", *_SLOW_TO_CAPTURE)
    }
)


def _cell(x: torch.Tensor, y: torch.Tensor, m: Model, n: int) -> torch.Tensor:
    """Attention in which a single query sees a single later key."""
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


LEAKY_BY_IDS: dict[str, Op] = {
    name: (lambda x, ids, m, n, f=mixer: f(x, m, (ids + n) % 4)) for name, mixer in UNUSUAL_MASKED_LEAKS.items()
}
"""Ops that make a later token visible for some inputs."""
LEAKY: dict[str, Op] = {
    "cell": _cell, "some_later": _some_later, "backwards": _backwards, "spread": _spread, "left": _left,
    "interleaved": _interleaved, **LEAKY_BY_IDS,
    **{
        name: (lambda x, y, m, n, f=mixer: f(x, m))
        for name, mixer in (LEAKS | UNUSUAL_LEAKS).items() if name not in ("one_cell", *_SLOW_TO_CAPTURE)
    },
}  # fmt: skip


class Several(Model):
    """A model of programs with shared weights that sums their losses.

    Common prefixes of programs are computed once. Each step adds the result of an op on two earlier values to the last
    value, so that every step reaches the loss.
    """

    def __init__(self, programs: Sequence[Steps]) -> None:
        super().__init__(lambda x, m: x)
        self.programs = tuple(programs)
        self.double().train()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        known = {(): (self.embedding(ids) + self.places[: ids.shape[1]],)}
        targets, losses = labels[:, 1:].reshape(-1), []
        for program in self.programs:
            for end in range(1, len(program) + 1):
                if program[:end] not in known:
                    values = known[program[: end - 1]]
                    known[program[:end]] = (*values, self._step(program[end - 1], values, ids))
            logits = self.head(self.norm(known[program][-1]))
            losses.append(F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), targets))
        return torch.stack(losses).sum()

    def _step(self, step: Step, values: tuple[torch.Tensor, ...], ids: torch.Tensor) -> torch.Tensor:
        name, other, number = step
        beside = ids if name in GOOD_BY_IDS or name in LEAKY_BY_IDS else values[other % len(values)]
        made = (GOOD | LEAKY)[name](values[-1], beside, self, number)
        return values[-1] + torch.tanh(made) * 0.5


def _step(random: Random, names: Collection[str]) -> Step:
    return random.choice(sorted(names)), random.randint(0, 6), random.randint(0, 6)


def programs(random: Random, count: int, most: int = 6) -> list[Steps]:
    """Return different causal programs of up to `most` steps, most of which share a prefix with others."""
    found: dict[Steps, None] = {}
    while len(found) < count:
        start: Steps = random.choice([(), *found]) if random.random() < 0.9 else ()
        start = start[: random.randint(0, most - 1)]
        more = 1 if start else random.randint(1, most)
        found[(*start, *(_step(random, GOOD) for _ in range(more)))] = None
    return list(found)


def leaky_programs(random: Random, count: int, most: int = 4) -> list[Steps]:
    """Return different programs with one leak each, preceded or followed by causal steps."""
    causal, found = programs(random, max(1, count // 10), most), {}
    while len(found) < count:
        start = random.choice(causal)[: random.randint(0, most)]
        rest = [_step(random, GOOD) for _ in range(random.randint(0, 1))]
        found[(*start, _step(random, LEAKY), *rest)] = None
    return list(found)


def lengths(random: Random, tokens: int) -> tuple[int, ...]:
    """Return random slice lengths."""
    cuts = random.sample(range(1, tokens), random.randint(1, 5))
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts), tokens]))


def batch_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, 2:4] = -100
    return {"ids": ids, "labels": labels}


# -- tests -----------------------------------------------------------------------------------------------------------


TOGETHER, BATCHES = 50, 40  # 2,000 programs


def check_equal(several: Sequence[Steps], random: Random) -> None:
    """All of them at once, in two slicings, in one stage and over up to three."""
    found, each = judged(Several(several), batch_of())
    refused = {steps: own for steps, own in zip(several, each, strict=True) if not isinstance(own, Recipe)}
    assert not refused and isinstance(found.recipe, Recipe), refused
    inputs, count = inputs_of(found), len(found.captured.graph.ops)
    expected_loss, expected = unsliced(found, inputs)
    for cut_at in ((), random.choice([(random.randrange(1, count),), (count // 4, count // 2)])):
        cut = lengths(random, found.recipe.tokens)
        loss, gradients = run_sliced(found, inputs, cut, cut_at)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-12)
        assert worst_error(gradients, expected) <= 1e-9, (cut, cut_at)
    assert not future_shows(found, inputs, random.randrange(1, found.recipe.tokens))


def check_refused(several: Sequence[Steps]) -> None:
    _, each = judged(Several(several), batch_of())
    passed = [steps for steps, own in zip(several, each, strict=True) if not isinstance(own, RefusedError)]
    assert not passed
    assert all(own.where and own.why and own.fix for own in each if isinstance(own, RefusedError))


def test_random_causal_programs_are_exact():
    random = Random(1)
    check_equal(programs(random, 5, most=4), random)


def test_random_leaks_are_refused():
    check_refused(leaky_programs(Random(2), 8, most=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BATCHES))
def test_many_random_causal_programs_are_exact(seed):
    random = Random(1000 + seed)
    check_equal(programs(random, TOGETHER), random)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BATCHES))
def test_many_random_leaks_are_refused(seed):
    check_refused(leaky_programs(Random(2000 + seed), TOGETHER))


@pytest.mark.slow
def test_each_leak_alone_is_refused():
    check_refused([(("linear", 0, 0), (name, 0, 7), ("gate", 0, 1)) for name in LEAKY])


@pytest.mark.slow
def test_programs_are_judged_as_each_alone():
    several = [*programs(Random(3), 2), *leaky_programs(Random(4), 2)]
    _, each = judged(Several(several), batch_of())
    for steps, together in zip(several, each, strict=True):
        alone = analysed(Several([steps]), batch_of()).recipe
        assert type(alone) is type(together)
        if isinstance(alone, RefusedError) and isinstance(together, RefusedError):
            assert alone.why == together.why
