"""Token slices on several processes: loss and gradients equal one process on whole sequences."""

from __future__ import annotations

import pytest
from support.grids import sampled
from support.jobs.slice_jobs import sliced
from support.models.zoo import CASES
from support.workers import Workers

import autopart
from autopart.ir.errors import RefusedError, UsageError

UNEVEN = (7, 5, 3, 1)


def check(workers: Workers, *what: object, played: str = "", tolerance: float = 1e-10) -> None:
    results = workers.run(sliced, *what)
    losses, found, orders = zip(*results, strict=True)
    assert len(set(losses)) == 1 and played in orders[0]
    assert found[0].gradient <= tolerance and abs(found[0].loss) <= 1e-6, found[
        0
    ]  # transformers computes the loss in fp32


@pytest.mark.parametrize(
    ("name", "schedule", "micros", "played"),
    sampled([("llama", "1f1b", 2, "1B0.3"), ("gpt2", "gpipe", 1, "0F0.3 0SF0.3>1")]),
)
def test_slices_on_two_stages_are_exact(pair: Workers, name: str, schedule: str, micros: int, played: str) -> None:
    check(pair, name, UNEVEN, 2, schedule, micros, 2 * micros, played=played)


def test_slices_under_a_mask_buffer_of_just_the_sequence_length_are_exact(pair: Workers) -> None:
    check(pair, "mask_buffer", (6, 6), 2, "1f1b", 2, 4, played="0F0.1")


@pytest.mark.slow
def test_models_and_lengths_that_cannot_be_sliced_are_refused() -> None:
    case = CASES["bert"]
    with pytest.raises(RefusedError):
        autopart.plan(case.model(), "cpu:2", sample=case.data(2), token_slices=2, costs="analytic")
    plan = autopart.plan(case.model(), "cpu:2", sample=case.data(2), token_slices="auto", costs="analytic")
    assert plan.decision.token_slices == () and any("sequences are whole" in note for note in plan.notes)
    with pytest.raises(UsageError, match="does not make up sequences of 16 tokens"):
        autopart.plan(CASES["gpt2"].model(), "cpu:2", sample=CASES["gpt2"].data(2), token_slices=(8, 4))
    with pytest.raises(UsageError, match="token_slices is 'many'"):
        autopart.plan(CASES["gpt2"].model(), "cpu:2", sample=CASES["gpt2"].data(2), token_slices="many")
