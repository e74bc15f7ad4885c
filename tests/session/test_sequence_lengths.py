"""Sequences of many lengths are padded in the loader: the page's collate function is exact, and messages name it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.documents.docs import ROOT
from torch import nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, cache
from autopart.ir.graph import Size

VOCAB, WIDTH = 11, 8


class Masked(nn.Module):
    """Attends to the tokens that a mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        x = x + F.scaled_dot_product_attention(x, self.mix(x), x, attn_mask=attention_mask[:, None, :].bool())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def page_collate() -> Any:
    """Return the collate function of the page."""
    (code,) = re.findall(r"```python\n(def collate.*?)```", (ROOT / "docs/batches.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {"torch": torch}
    exec(code, found)
    return found["collate"]


def test_batches_of_the_pages_collate_function_are_exact_and_of_few_kinds() -> None:
    collate, generator, model = page_collate(), torch.Generator().manual_seed(0), Masked().double()
    shapes = set()
    lengths = ((5, 3), (7, 6), (9, 2), (4, 8))
    rows = [
        [{k: torch.randint(VOCAB, (n,), generator=generator).tolist() for k in ("input_ids", "labels")} for n in batch]
        for batch in lengths
    ]
    with autopart.compile(
        model, "cpu:1", sample=collate(rows[0], 8), micro_batches=2, costs="analytic", cache=False
    ) as pipe:
        for batch in rows:
            padded, plain = collate(batch, 8), collate(batch, 1)
            shapes.add(tuple(padded["labels"].shape))
            model.zero_grad()
            loss = pipe.step(padded).item()
            found = pipe.gradients()
            model.zero_grad()
            expected = model(**plain)
            expected.backward()
            assert abs(loss - expected.item()) < 1e-10
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad)
    assert shapes == {(2, 8), (2, 16)}


def test_many_lengths_are_warned_of_once_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MANY_SHAPES", 3)
    captures = CaptureCache(Masked())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopart.CaptureWarning)
        for tokens in range(2, 7):
            ids = torch.ones(2, tokens, dtype=torch.long)
            captures(flatten({"input_ids": ids, "attention_mask": ids, "labels": ids}), Size(2))
    told = [str(warning.message) for warning in caught if warning.category is autopart.CaptureWarning]
    assert len(told) == 1
    assert "pad_to_multiple_of" in told[0]


@pytest.mark.parametrize("name", ["pad_to", "pad_with"])
def test_padding_by_the_pipe_is_refused_with_the_way_out(name: str) -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(autopart.UsageError, match=rf"no option {name}=(.|\n)*collate(.|\n)*pad_to_multiple_of"):
        autopart.plan(
            Masked(),
            "cpu:1",
            sample={"input_ids": ids, "attention_mask": ids, "labels": ids},
            **{name: (8,)},  # type: ignore[arg-type]
        )
