"""Random causal programs, cut at random, equal the whole sequence; with one leak anywhere in them they are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sliced import analysed, future_shows, inputs_of, run_sliced, unsliced, worst_error
from support.token_programs import LEAKY, Program, batch_of, leaky, programs

from autopart.ir.errors import TokenRefusal
from autopart.passes.tokens.recipe import Recipe

HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]
quick = settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=HEALTH)
long = settings(max_examples=2000, deadline=None, suppress_health_check=HEALTH)


@st.composite
def lengths(draw: st.DrawFn, tokens: int) -> tuple[int, ...]:
    cuts = draw(st.sets(st.integers(1, tokens - 1), min_size=1, max_size=5))
    ends = [0, *sorted(cuts), tokens]
    return tuple(b - a for a, b in pairwise(ends))


def check_equal(program: Program, data: st.DataObject) -> None:
    batch = batch_of()
    found = analysed(program, batch)
    assert isinstance(found.recipe, Recipe), found.recipe
    inputs, count = inputs_of(found), len(found.captured.graph.ops)
    cut_at = data.draw(st.sampled_from([(), (count // 3,), (count // 2,), (count // 4, count // 2)]))
    loss, gradients = run_sliced(found, inputs, data.draw(lengths(found.recipe.tokens)), cut_at)
    expected_loss, expected = unsliced(found, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-12)
    assert worst_error(gradients, expected) <= 1e-9
    assert not future_shows(found, inputs, data.draw(st.integers(1, found.recipe.tokens - 1)))


def check_refused(program: Program) -> None:
    refusal = analysed(program, batch_of()).recipe
    assert isinstance(refusal, TokenRefusal)
    assert refusal.where and refusal.why and refusal.fix


@quick
@given(programs().map(Program), st.data())
def test_random_causal_programs_are_exact(program, data):
    check_equal(program, data)


@quick
@given(leaky().map(Program))
def test_random_leaks_are_refused(program):
    check_refused(program)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@long
@given(programs().map(Program), st.data())
def test_many_random_causal_programs_are_exact(program, data):
    check_equal(program, data)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@long
@given(leaky().map(Program))
def test_many_random_leaks_are_refused(program):
    check_refused(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKY)
def test_each_leak_alone_is_refused(name):
    check_refused(Program((("linear", 0, 0), (name, 0, 7), ("gate", 0, 1))))
