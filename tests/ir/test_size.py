"""Sizes of micro-batches: what they say, and which there can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.languages.graphs import layers

from autopart.ir.errors import GraphError
from autopart.ir.graph import Size, check


def test_a_size_is_of_whole_sequences_unless_it_says_so() -> None:
    assert Size(4) == Size(4, None) != Size(4, 128)
    assert [str(size) for size in (Size(1), Size(4), Size(2, 128), Size(2, 1))] == [
        "1 row",
        "4 rows",
        "2 rows of 128 tokens",
        "2 rows of 1 token",
    ]


@pytest.mark.parametrize("rows", [0, -1, 1.0, True])
def test_rows_and_tokens_are_counted_from_one(rows: Any) -> None:
    for size in (Size(rows), Size(1, rows)):
        with pytest.raises(GraphError, match="a size has"):
            check(replace(layers(1), size=size))
    assert check(replace(layers(1), size=Size(3, 2))).rows == 3


def test_the_size_is_part_of_what_a_graph_is_for() -> None:
    g = layers(1)
    others = [replace(g, size=size) for size in (Size(2), Size(1, 8), Size(1, 9))]
    assert len({other.shape_digest() for other in (g, *others)}) == 4
    assert {other.structure_digest() for other in others} == {g.structure_digest()}
    assert [other.rows for other in others] == [2, 1, 1]
