"""What slices keep of keys and values: once, as attention reads them, and they read no more than a window shows."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from support.grids import sampled
from support.models.tokens.decoder import HEADS, SEQ, WIDTH, Shape, decoder
from support.oracles.sliced import Analysed, analysed, inputs_of, run_sliced, sliced_stages, unsliced, worst_error

from autopart.passes.tokens.recipe import Recipe

LENGTHS = (4, 3, 2, 4, 2, 1)


def found(shape: Shape, rows: int = 2) -> Analysed:
    case = decoder(shape)
    return analysed(case.model(torch.float64), case.data(rows, torch.float64))


def check_exact(model: Analysed) -> None:
    inputs, half = inputs_of(model), len(model.captured.graph.ops) // 2
    expected_loss, expected = unsliced(model, inputs)
    for cuts in ((), (half,)):
        loss, gradients = run_sliced(model, inputs, LENGTHS, cuts)
        assert abs(float(loss - expected_loss)) <= 1e-12
        assert worst_error(gradients, expected) <= 1e-10


@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_slice_reads_what_its_window_shows(window: int | None) -> None:
    shape = Shape(layers=1, window=window)
    model = found(shape)
    recipe = model.recipe
    assert isinstance(recipe, Recipe)
    ((_, slices),) = sliced_stages(model.captured, recipe, LENGTHS, ())
    starts = [*accumulate(LENGTHS, initial=0)]
    for code, start, end in zip(slices, starts, starts[1:], strict=False):
        assert len(code.buffers) == 2 and not code.past
        first = 0 if window is None else max(0, start - (window - 1))
        for at in code.buffers:  # as attention reads them: a mask needs keys of all heads
            assert at.shape == (2, shape.groups if window is None else HEADS, SEQ, WIDTH // HEADS)
            assert (at.low, at.start, at.end) == (first, start, end)
    check_exact(model)


@pytest.mark.parametrize(
    "shape", sampled([Shape(window=4, written_out=True), Shape(window=6, groups=1, written_out=True)])
)
def test_windows_of_attention_that_is_written_out_are_exact(shape: Shape) -> None:
    check_exact(found(shape))
