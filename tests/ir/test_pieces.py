"""Pieces print and parse, and overlap as sets of elements do."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.errors import PlanError
from autopart.ir.shares import Piece, cut, overlap, parse_piece, whole
from autopart.runtime.tensors import common

SHAPE = (12, 24)
NAMES = st.one_of(
    st.sampled_from(["w", "a.b[0:1/2]", "w[0:0/1]", "w[3:0/1]", "w[1:1/2][0:0/1]", "", "w\n[0:1/2]"]),
    st.text(alphabet="w.[]0:1/2", max_size=12),
)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    parts = draw(st.sampled_from([1, 2, 3, 4, 6]))
    axis = draw(st.integers(0, 1)) if parts > 1 else 0
    return Piece(draw(NAMES), axis, parts, draw(st.integers(0, parts - 1)))


def elements(piece: Piece) -> torch.Tensor:
    """Return the numbers of the elements of a piece of a tensor of this shape, found one by one."""
    size = SHAPE[piece.axis] // piece.parts
    inside = [at for at in product(*map(range, SHAPE)) if at[piece.axis] // size == piece.index]
    own = [size if axis == piece.axis else n for axis, n in enumerate(SHAPE)]
    return torch.tensor([i * SHAPE[1] + j for i, j in inside]).view(own)


@given(pieces())
def test_a_piece_prints_and_parses(piece: Piece) -> None:
    assert parse_piece(str(piece)) == piece


@given(st.lists(pieces(), unique=True))
def test_different_pieces_print_differently(every: list[Piece]) -> None:
    assert len({str(piece) for piece in every}) == len(every)


def test_a_whole_tensor_prints_as_its_name_and_a_part_with_its_place() -> None:
    assert str(whole("layers.0.weight")) == "layers.0.weight"
    assert [str(piece) for piece in cut("w", 1, 2)] == ["w[1:0/2]", "w[1:1/2]"]
    assert cut("w", 1, 1) == (whole("w"),)


@given(pieces(), pieces())
def test_what_two_pieces_have_in_common_is_what_both_have_of_the_elements(a: Piece, b: Piece) -> None:
    mine, others = elements(a), elements(b)
    found = common(mine, a, b)
    expected = set(mine.flatten().tolist()) & set(others.flatten().tolist())
    assert set(found.flatten().tolist()) == expected
    assert overlap(a, b) * SHAPE[0] * SHAPE[1] == len(expected) == found.numel()
    assert found.tolist() == common(others, b, a).tolist()


@given(pieces())
def test_the_pieces_of_a_cut_are_all_of_the_tensor(piece: Piece) -> None:
    every = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE)
    joined = [common(every, whole("w"), each) for each in cut("w", piece.axis, piece.parts)]
    assert torch.equal(torch.cat(joined, piece.axis), every)


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_unequal_parts_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"w of shape .* has no 2 equal parts along axis 0"):
        common(torch.zeros(shape), whole("w"), Piece("w", 0, 2, 1))
