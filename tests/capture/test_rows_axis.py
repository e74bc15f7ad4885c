"""Which inputs have rows: guessed from sizes, stated by rows_axis=, and never wrong in silence."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import BatchReader, flatten
from autopart.ir.errors import AutopartError, BatchError, CaptureError, RefusedError, UsageError

SIZE = 8
"""Rows, tokens, classes and width alike, so that every guess by size can be wrong."""
Extra = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Reading(nn.Module):
    """A classifier that reads one input more in some way."""

    def __init__(self, read: Extra) -> None:
        super().__init__()
        self.word, self.head, self.read = nn.Embedding(SIZE, SIZE), nn.Linear(SIZE, SIZE), read

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return self.read(self, self.word(ids), labels, extra)


def each(model: Reading, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(h.mean(1)), labels, reduction="none")


def scaled(factor: Callable[[torch.Tensor], torch.Tensor]) -> Extra:
    return lambda model, h, labels, extra: each(model, h * factor(extra), labels).mean()


READINGS: dict[str, tuple[Extra, tuple[int, ...]]] = {
    "weights by class": (lambda m, h, y, w: F.cross_entropy(m.head(h.mean(1)), y, weight=w), (SIZE,)),
    "looked up": (lambda m, h, y, w: (w[y] * each(m, h, y)).mean(), (SIZE,)),
    "gathered": (lambda m, h, y, w: (w.gather(0, y) * each(m, h, y)).mean(), (SIZE,)),
    "selected": (lambda m, h, y, w: (torch.index_select(w, 0, y) * each(m, h, y)).mean(), (SIZE,)),
    "embedded": (lambda m, h, y, w: (F.embedding(y, w[:, None]).squeeze(1) * each(m, h, y)).mean(), (SIZE,)),
    "one-hot": (lambda m, h, y, w: ((F.one_hot(y, SIZE).float() @ w) * each(m, h, y)).mean(), (SIZE,)),
    "buckets": (lambda m, h, y, w: (torch.bucketize(y, w.cumsum(0)) * each(m, h, y)).mean(), (SIZE,)),
    "positions": (lambda m, h, y, p: each(m, h + m.word(p.long()), y).mean(), (SIZE,)),
    "mask": (lambda m, h, y, mask: each(m, (h @ h.mT + mask) @ h, y).mean(), (SIZE, SIZE)),
    "graph": (lambda m, h, y, a: each(m, a @ h, y).mean(), (SIZE, SIZE)),
    "sum": (scaled(lambda x: x.sum()), (SIZE,)),
    "mean": (scaled(lambda x: x.mean()), (SIZE,)),
    "most": (scaled(lambda x: x.max()), (SIZE,)),
    "first": (scaled(lambda x: x[0]), (SIZE,)),
    "last": (scaled(lambda x: x[-1]), (SIZE,)),
    "norm": (scaled(lambda x: (x / x.norm()).sum()), (SIZE,)),
    "softmax": (scaled(lambda x: x.softmax(0)[0]), (SIZE,)),
    "count": (scaled(lambda x: torch.ones(()) * x.numel()), (SIZE,)),
    "by row": (lambda m, h, y, w: (w * each(m, h, y)).mean(), (SIZE,)),
}

QUICK = ("looked up", "one-hot", "positions", "mask", "mean", "first", "softmax")
SLOW = pytest.mark.slow


def drawn(name: str, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    read, shape = READINGS[name]
    labels = torch.randint(2 if seed % 2 else SIZE, (SIZE,))
    return Reading(read), {"ids": torch.randint(SIZE, (SIZE, SIZE)), "labels": labels, "extra": torch.rand(shape)}


def require_exact(pipe: autopart.Pipe, plain: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    plain.zero_grad()
    loss = plain(**batch)
    loss.backward()
    assert torch.allclose(pipe.step(batch), loss.detach(), atol=1e-5)
    found = pipe.gradients()
    assert all(torch.allclose(found[name], p.grad, atol=1e-5) for name, p in plain.named_parameters())


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in READINGS])
def test_a_guess_is_exact_or_refused(name):
    seed = random.Random(name).randint(0, 99)
    model, batch = drawn(name, seed)
    plain = copy.deepcopy(model)
    try:
        pipe = autopart.compile(model, "cpu:1", sample=batch, micro_batches=4, costs="analytic", cache=False)
    except (CaptureError, RefusedError):
        return
    with pipe:
        require_exact(pipe, plain, batch)


@pytest.mark.parametrize("name", ["looked up", "positions", "mask"])
def test_what_is_stated_to_have_no_rows_is_cut_exactly(name):
    model, batch = drawn(name, 1)
    plain, options = copy.deepcopy(model), {"micro_batches": 4, "costs": "analytic", "cache": False}
    with autopart.compile(model, "cpu:1", sample=batch, rows_axis={"extra": None}, **options) as pipe:
        require_exact(pipe, plain, batch)


class Rotary(nn.Module):
    """Positions [3, rows, tokens], as of Qwen2-VL, and a view that needs them in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.head = nn.Embedding(20, 8), nn.Embedding(40, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = self.place(positions.view(-1)).view(*positions.shape, 8).sum(0) if positions.dim() == 3 else 0
        return F.cross_entropy(self.head(torch.tanh(self.word(ids) + places)).flatten(0, 1), labels.flatten())


def rotary(rows: int, tokens: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(20, (rows, tokens))
    return {"ids": ids, "labels": ids, "positions": torch.randint(40, (3, rows, tokens))}


def test_rows_on_another_axis_are_cut_there_in_every_batch_and_call():
    torch.manual_seed(0)
    model = Rotary()
    plain, options = copy.deepcopy(model), {"micro_batches": 4, "costs": "analytic", "rows_axis": {"positions": 1}}
    with autopart.compile(model, "cpu:1", sample=rotary(8), **options) as pipe:
        for rows in (8, 7, 3, 1):
            pipe.zero_grad()
            batch = rotary(rows)
            require_exact(pipe, plain, batch)
            assert torch.allclose(pipe.predict(batch), plain(**batch), atol=1e-5)
        with pytest.raises(BatchError, match=r"positions have 8 and 4 rows(.|\n)*rows_axis="):
            pipe.step({**rotary(8), "positions": torch.randint(40, (3, 4, 8))})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda batch: batch, 'rows_axis={"positions": 1}'),
        (lambda batch: {**batch, "positions": torch.arange(8), "extra": None}, None),
        (lambda batch: {**batch, "labels": batch["labels"].flatten()}, "reshape"),
    ],
    ids=["positions", "one axis", "flat"],
)
def test_an_error_names_what_was_cut_and_a_statement_that_works(change, named):
    batch = change(rotary(8))
    batch.pop("extra", None)
    options = {"micro_batches": 4, "costs": "analytic"}
    if named is None:
        with autopart.compile(Rotary(), "cpu:1", sample=batch, **options) as pipe:
            assert len(pipe.plan.micro_rows) == 4
        return
    with pytest.raises(CaptureError, match=re.escape(named)) as raised:
        autopart.compile(Rotary(), "cpu:1", sample=batch, **options)
    assert "cut by 8 entries on axis 0, or by rows_axis=: ids [8, 8]" in raised.value.why
    if named.startswith("rows_axis="):
        stated = eval(named.removeprefix("rows_axis="))
        with autopart.compile(Rotary(), "cpu:1", sample=batch, rows_axis=stated, **options) as pipe:
            assert len(pipe.plan.micro_rows) == 4


@pytest.mark.parametrize("name", ["positions", "softmax"])
def test_the_planner_falls_back_to_one_micro_batch(name):
    model, batch = drawn(name, 3)
    plain = copy.deepcopy(model)
    with autopart.compile(model, "cpu:1", sample=batch, costs="analytic", cache=False) as pipe:
        assert len(pipe.plan.micro_rows) == 1
        assert any(note.startswith("only one micro-batch was tried") for note in pipe.plan.outlook.notes)
        require_exact(pipe, plain, batch)


def test_a_model_that_cannot_be_captured_whole_either_is_refused_as_before():
    model = Reading(lambda m, h, y, w: each(m, h, y).mean() * (1 if float(m.head.bias.sum()) > 0 else 2))
    with pytest.raises(AutopartError) as raised:
        autopart.compile(model, "cpu:1", sample=drawn("by row", 0)[1], costs="analytic")
    assert "whole batch" not in raised.value.what


def test_statements_are_checked():
    batch = rotary(8)
    with pytest.raises(BatchError, match="input positions has rows on axis 3"):
        flatten(batch, rows_axis={"positions": 3})
    with pytest.warns(UserWarning, match="rows_axis names place, and the inputs of this batch are ids, labels"):
        flatten(batch, rows_axis={"place": 1})
    for wrong in (1, {"positions": "1"}, {"positions": True}):
        with pytest.raises(UsageError, match="rows_axis"):
            autopart.compile(Rotary(), "cpu:1", sample=batch, rows_axis=wrong)


def test_a_statement_counts_for_all_that_is_inside_and_from_behind():
    reader = BatchReader({"images": None, "arg0": -2})
    batch = reader.read(((torch.ones(3, 4, 2),), {"images": [torch.ones(3, 2)] * 4, "more": torch.ones(4)}))
    assert (batch.rows, batch.names[0], batch.axes[0]) == (4, "arg0", 1)
    assert [name for name, split in zip(batch.names, batch.splits, strict=True) if split] == ["arg0", "more"]
    assert batch.leaves[0].shape == (4, 3, 2)
    assert batch.arguments(batch.leaves)[0][0].shape == (3, 4, 2)
