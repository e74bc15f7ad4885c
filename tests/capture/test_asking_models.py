"""Real models that ask about the numbers of their batch: the step is that of the plain model, whole and in parts."""

from __future__ import annotations

import pytest
from support.models.value_reading_models import CASES, Case
from support.oracles.one_process import gradient_error, gradients_of

import autopart

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_two_different_batches_are_exact_whole_and_in_micro_batches(case: Case):
    for micros in case.micros:
        model, plain = case.model(), case.model()
        sample = case.batch(4, 0)
        with autopart.compile(model, "cpu:1", sample=sample, micro_batches=micros, costs="analytic") as pipe:
            for seed in (0, 1):
                model.zero_grad()
                plain.zero_grad()
                batch = case.batch(4, seed)
                loss = plain(**batch).loss
                loss.backward()
                assert pipe.step(batch).item() == pytest.approx(loss.item(), rel=1e-5)
                error, worst = gradient_error(pipe.gradients(), gradients_of(plain))
                assert error <= 1e-5, worst
