"""Random causal programs, cut at random, equal the whole sequence; with one leak anywhere in them they are refused."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from support.languages.token_programs import LEAKY, Several, Steps, batch_of, leaky_programs, lengths, programs
from support.oracles.sliced import analysed, future_shows, inputs_of, judged, run_sliced, unsliced, worst_error

from autopart.ir.errors import RefusedError
from autopart.passes.tokens.recipe import Recipe

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
