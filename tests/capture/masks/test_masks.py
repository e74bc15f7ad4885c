"""Attention masks that hide nothing or later tokens are left out, all others stay, and gradients are exact."""

from __future__ import annotations

import random

import pytest
import torch
from support.models.tokens.token_models import Model, prefix_mask, token_batch
from support.oracles.one_process import gradients_of
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.capture.python.reads.masks import Effect
from autopart.ir.errors import RefusedError

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


# -- tests -----------------------------------------------------------------------------------------------------------


def effect_of(mask: torch.Tensor, form: str) -> Effect:
    """Return what a mask of bools does, by its definition."""
    if bool(mask.all()):
        return Effect.NONE
    triangle = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return Effect.CAUSAL if bool((mask == triangle).all()) and form != "-1e4" else Effect.OTHER


def compare(model: nn.Module, *batches: dict[str, torch.Tensor], **options: object) -> None:
    """Run batches, one after the other, and compare each with one process."""
    plain = []
    for given in batches:
        model.zero_grad()
        loss = model(**given)
        loss.backward()
        plain.append((loss.detach(), {name: value.clone() for name, value in gradients_of(model).items()}))
    model.zero_grad()
    with autopart.compile(model, "cpu:1", sample=batches[0], costs="analytic", cache=False, **options) as pipe:
        for given, (loss, gradients) in zip(batches, plain, strict=True):
            model.zero_grad()
            torch.testing.assert_close(pipe.step(given), loss, rtol=1e-12, atol=1e-12, equal_nan=True)
            for name, found in pipe.gradients().items():
                torch.testing.assert_close(found, gradients[name], rtol=1e-9, atol=1e-11, equal_nan=True)


def random_case(seed: int) -> tuple[Masked, torch.Tensor, Effect]:
    """Return a model, what it is given, and what its mask does."""
    draw = random.Random(seed)
    kind, source, form = KINDS[seed % len(KINDS)], draw.choice(SOURCES), draw.choice(FORMS)
    mask = shown(kind, draw)
    given = mask
    if source == "constant":
        mask = mask[:1].expand_as(mask)
        given = torch.ones(mask.shape[0], TOKENS, dtype=torch.long)
    elif source == "computed":
        given = torch.ones(mask.shape[0], TOKENS, dtype=torch.long)
        if kind in ("padding", "triangle and padding"):
            given[draw.randrange(mask.shape[0]), -draw.randint(1, 3) :] = 0
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & given.bool()[:, None, None, :]
    return Masked(mask, source, form, draw.choice(("full", "heads"))), given, effect_of(mask, form)


def check_random(seed: int) -> None:
    model, given, effect = random_case(seed)
    assert capture(model, flatten(batch(given))).masks == (effect,), seed
    compare(model, batch(given), micro_batches=2)


@pytest.mark.parametrize("seed", range(2))
def test_random_masks_are_left_dropped_or_made_causal_rightly(seed: int) -> None:
    check_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 304, 30))
def test_many_random_masks_are_left_dropped_or_made_causal_rightly(first: int) -> None:
    for seed in range(first, first + 30):
        check_random(seed)


def test_a_mask_of_a_parameter_stays_and_gets_its_gradient() -> None:
    mask = torch.ones(4, 1, TOKENS, TOKENS, dtype=torch.bool)
    model = Masked(mask, "parameter", "-inf", "full")
    assert capture(model, flatten(batch(mask))).masks == (Effect.OTHER,)
    compare(model, batch(mask), micro_batches=2)


def test_a_batch_with_padding_after_one_without_and_back_is_exact() -> None:
    every = torch.ones(4, TOKENS, dtype=torch.long)
    padded, first_padded = every.clone(), every.clone()
    padded[3, 4:], first_padded[0, 4:] = 0, 0
    model = Masked(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), "computed", "bool", "full")
    compare(model, batch(every), batch(padded), batch(every), batch(first_padded), micro_batches=2)


class WrittenInPlace(nn.Module):
    """Attention with a conjunction of masks that is changed in place after it was made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) & given[:, None, None, :]
        seen[..., -1] = False
        hidden = self.layer(x)[:, None]
        return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=seen).square().mean()


def test_a_mask_that_is_written_to_in_place_counts_as_it_is_in_the_end() -> None:
    x, given = torch.randn(4, 5, 4, dtype=torch.float64), torch.ones(4, 5, dtype=torch.bool)
    captured = capture(WrittenInPlace(), flatten({"x": x, "given": given}))
    assert captured.masks == (Effect.OTHER,)
    compare(WrittenInPlace(), {"x": x, "given": given}, micro_batches=2)


def test_in_slices_a_later_batch_that_shows_later_tokens_is_refused_and_the_next_is_exact() -> None:
    model, causal, leaking = Model(prefix_mask).train(), token_batch(mask="padding"), token_batch(mask="documents")
    options = {"costs": "analytic", "cache": False, "token_slices": 2}
    loss = model(**causal).detach()
    with autopart.compile(model, "cpu:1", sample=causal, **options) as pipe:
        torch.testing.assert_close(pipe.step(causal), loss)
        with pytest.raises(RefusedError, match="scaled_dot_product_attention"):
            pipe.step(leaking)
        torch.testing.assert_close(pipe.step(causal), loss)


class Grouped(nn.Module):
    """Attention with two heads of keys for four of queries, repeated as `repeat` does it."""

    def __init__(self, repeat: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(8, 16).double(), nn.Linear(8, 8).double()
        self._repeat = repeat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        rows, tokens, _ = x.shape
        query = self.query(x).view(rows, tokens, 4, 4).transpose(1, 2)
        key = self.key(x).view(rows, tokens, 2, 4).transpose(1, 2)
        if self._repeat == "expand":
            key = key[:, :, None].expand(rows, 2, 2, tokens, 4).reshape(rows, 4, tokens, 4)
        elif self._repeat == "repeat_interleave":
            key = key.repeat_interleave(2, dim=1)
        else:
            key = key.repeat(1, 2, 1, 1)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True).square().mean()


@pytest.mark.parametrize(("repeat", "grouped"), [("expand", True), ("repeat_interleave", True), ("tile", False)])
def test_keys_repeated_for_groups_of_queries_are_read_once(repeat: str, grouped: bool) -> None:
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    captured = capture(Grouped(repeat), flatten({"x": x}))
    (attention,) = [op for op in captured.graph.ops if "scaled_dot" in op.target]
    assert (dict(attention.attrs).get("enable_gqa") is True) == grouped
    compare(Grouped(repeat), {"x": x}, micro_batches=2)
