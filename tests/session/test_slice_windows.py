"""What slices keep of keys and values: before they are repeated, and no more of them than a window shows."""

from __future__ import annotations

import pytest
import torch
from support.decoder import HEADS, SEQ, WIDTH, Shape, decoder
from support.sliced import Analysed, analysed, inputs_of, run_sliced, sliced_stages, unsliced, worst_error

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
    model = found(Shape(layers=1, window=window))
    recipe = model.recipe
    assert isinstance(recipe, Recipe)
    (stage,) = sliced_stages(model.captured, recipe, LENGTHS, ())
    first = stage.slices[0]
    shapes = model.captured.graph.value_map()
    for state in first.states:  # two heads of keys, not four
        assert shapes[state].size_bytes == shapes[state].shape[0] * SEQ * WIDTH * 2 // HEADS * 8
    starts = [part.start for part in stage.slices]
    for part in stage.slices:
        reach = part.start if window is None else window - 1
        seen = [
            n for n, other in enumerate(stage.slices) if other.end > part.start - reach and other.start < part.start
        ]
        assert {number for _, number in part.past} == set(seen), (starts, part.start)
    check_exact(model)


@pytest.mark.parametrize("shape", [Shape(window=4, written_out=True), Shape(window=6, groups=1, written_out=True)])
def test_windows_of_attention_that_is_written_out_are_exact(shape: Shape) -> None:
    check_exact(found(shape))
