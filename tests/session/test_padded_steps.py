"""Batches that are padded to a few lengths: exact, few captures, and refused where padding would change the loss."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.jobs import padding_jobs as jobs
from support.models.padded_models import Causal, tokens
from support.workers import Workers

import autopart
from autopart.session.step import padded

LENGTHS = (5, 8, 3, 16, 11, 20, 9, 8, 13)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "causal" else []) for name in jobs.MODELS]
)
def test_padded_steps_are_exact_and_only_the_listed_lengths_are_captured(pair: Workers, name: str) -> None:
    for worst, shapes, again in pair.run(jobs.compared, name, LENGTHS, (8, 16)):
        assert worst < 1e-5
        assert shapes == {(8,), (16,), (20,)}
        assert again == 0


def test_a_model_that_padding_would_change_is_refused_on_all_ranks(pair: Workers) -> None:
    for said in pair.run(jobs.refused, 5):
        assert len(said) == 2
        assert all("padding changes the loss of this model" in text for text in said)
        assert all("idx (4, 8) from (4, 5)" in text for text in said)


class UpToThree(Causal):
    """Has the same loss for up to three tokens of padding."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(idx, targets) + ((targets == -100).sum(1).clamp(min=3) - 3).float().sum()


def test_more_padding_than_was_proved_is_proved_again() -> None:
    def batch(length: int) -> dict[str, torch.Tensor]:
        return {"idx": tokens(length), "targets": tokens(length)}

    options = {"pad_to": (8,), "costs": "analytic", "micro_batches": 1}
    with (
        autopart.compile(UpToThree(), "cpu:1", sample=batch(7), **options) as pipe,
        mock.patch.object(padded, "require_same_loss", side_effect=padded.require_same_loss) as proofs,
    ):
        for length, proved in ((8, 0), (7, 0), (5, 1), (6, 1), (5, 1)):
            pipe.step(batch(length))
            assert proofs.call_count == proved
        with pytest.raises(autopart.RefusedError, match="padding changes the loss"):
            pipe.step(batch(4))
        pipe.step(batch(5))


def test_what_a_model_returns_is_not_padded(pair: Workers) -> None:
    assert pair.run(jobs.outputs, 5) == [(4, 5, 5)] * 2


def test_plan_and_verify_pad_their_sample() -> None:
    batch, options = {"idx": tokens(5), "targets": tokens(5)}, {"pad_to": [16, 8], "costs": "analytic"}
    planned = autopart.plan(Causal(), "cpu:1", sample=batch, **options)
    longer = {"idx": tokens(8), "targets": tokens(8)}
    assert planned.provenance == autopart.plan(Causal(), "cpu:1", sample=longer, costs="analytic").provenance
    verified = autopart.verify(Causal(dropout=0.0), "cpu:1", sample=batch, micro_batches=2, **options)
    assert verified.ok, verified.table()


def test_dropout_is_drawn_as_for_the_padded_batch() -> None:
    torch.manual_seed(0)
    model = Causal(dropout=0.5)
    batch = {"idx": tokens(5), "targets": tokens(5)}
    longer = {key: torch.cat([value, torch.full((4, 3), filler)], 1) for (key, value), filler in
              zip(batch.items(), (0, -100), strict=True)}  # fmt: skip
    losses = []
    for given, options in ((batch, {"pad_to": (8,)}), (longer, {})):
        with autopart.compile(model, "cpu:1", sample=given, costs="analytic", **options) as pipe:
            losses.append(pipe.step(given).item())
    assert losses[0] == losses[1]


def test_fillers_without_lengths_are_noted() -> None:
    batch = {"idx": tokens(5), "targets": tokens(5)}
    plan = autopart.plan(Causal(), "cpu:1", sample=batch, costs="analytic", pad_with={"idx": 1})
    assert "pad_with= has no effect" in plan.explain()


@pytest.mark.parametrize(
    "option", [{"pad_to": 8}, {"pad_to": (0,)}, {"pad_to": ("8",)}, {"pad_with": {"x": "0"}}, {"pad_with": {1: 0}}]
)
def test_impossible_values_are_refused(option) -> None:
    with pytest.raises(autopart.UsageError, match=next(iter(option))):
        autopart.plan(Causal(), "cpu:1", sample=tokens(5), **option)
