"""Losses of several terms with different counts, and masks made in forward(), equal those of one process."""

from __future__ import annotations

import pytest
import torch
from support.jobs import learned_loss_jobs as learned
from support.jobs import misleading_jobs as jobs
from support.models.loss_models import LOSSES
from support.models.mask_models import MASKED
from support.workers import Workers

SLOW = ("class weights", "a detector", "spans", "a transformer with masks", "packed sequences")
NAMES = [name if name not in SLOW else pytest.param(name, marks=pytest.mark.slow) for name in [*LOSSES, *MASKED]]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_exact_even_if_a_micro_batch_counts_nothing(pair: Workers, name: str) -> None:
    losses, gradients, error = pair.run(jobs.piped, name)[0]
    expected, plain = jobs.alone(name)
    assert error is None, error
    assert losses == pytest.approx(expected, rel=1e-10)
    for found, wanted in zip(gradients, plain, strict=True):
        for parameter, gradient in wanted.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-13)


def test_a_loss_function_with_parameters_is_trained_saved_and_loaded(pair: Workers) -> None:
    losses, gradients, state = learned.alone()
    for found, kept, (loaded, plain) in pair.run(learned.piped):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)
        assert found[2].keys() == state.keys() == kept.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found[2][name], tensor, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(kept[name], tensor, rtol=1e-9, atol=1e-12)
        assert loaded == pytest.approx(plain, rel=1e-10)


@pytest.mark.slow
def test_verify_compares_the_parameters_of_a_loss_function_and_leaves_it_as_it_was(pair: Workers) -> None:
    for ok, compared, untouched in pair.run(learned.verified):
        assert ok and untouched and {"loss_fn.spread", "loss_fn.head.weight"} <= compared


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("a name of the model", "the model has a module loss_fn", marks=pytest.mark.slow),
        ("a function", "a parameter that belongs to neither the model nor"),
        pytest.param("a method", "a parameter that belongs to neither the model nor", marks=pytest.mark.slow),
    ],
)
def test_loss_parameters_that_would_not_be_trained_are_refused(pair: Workers, kind: str, words: str) -> None:
    for error in pair.run(learned.refused, kind):
        assert error is not None and words in error.what and error.fix
