"""The program at other rows, from two captures, against a capture at those rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.languages.graphs import graph

from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph, Literal, Size
from autopart.passes.ops.resize import resize

DEFAULT = ("convnext",)
SLOW = ("gpt2", "bert", "llama", "vit", "resnet", "t5", "opt", "gemma2")


def check(name: str) -> None:
    """Captures at 2, 4 and 5 rows: from the outer ones the one in between, and from the lower ones the upper."""
    from support.models.zoo import CASES

    from autopart.batch.batch import flatten
    from autopart.capture import CaptureCache

    case = CASES[name]
    capturer, batch = CaptureCache(case.model()), flatten(case.data(12))
    made = {rows: capturer(batch, Size(rows)).graph for rows in (2, 4, 5)}
    for one, two, wanted in ((2, 5, 4), (5, 2, 4), (2, 4, 5)):
        grown = resize(made[one], made[two], Size(wanted))
        assert grown.shape_digest() == made[wanted].shape_digest()
        assert plain(grown) == plain(made[wanted])


def plain(g: Graph) -> Graph:
    """Without what no plan depends on: where in the user's code an op stands."""
    return replace(g, ops=tuple(replace(op, where="") for op in g.ops))


@pytest.mark.parametrize("name", DEFAULT)
def test_program_between_two_captures_is_the_captured_one(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_program_of_more_models_is_the_captured_one(name: str) -> None:
    check(name)


# ---- by hand -------------------------------------------------------------------------------------------------------


def program(rows: int, size: int, attr: Literal = None) -> Graph:
    """One op whose value has `size` elements of four bytes."""
    g = graph("a <- x")
    values = tuple(replace(v, shape=(size, 3), size_bytes=12 * size) if v.name == "a" else v for v in g.values)
    return replace(g, size=Size(rows), values=values, ops=(replace(g.ops[0], attrs=(("arg", attr),)),))


def test_sizes_and_numbers_among_the_arguments_grow_along_a_line() -> None:
    one, two = program(2, 7, (2, ("%x", 10))), program(4, 13, (4, ("%x", 10)))
    assert resize(one, two, Size(3)) == program(3, 10, (3, ("%x", 10)))
    assert resize(one, two, Size(10)) == program(10, 31, (10, ("%x", 10)))
    assert resize(one, two, Size(2)) is one


def test_a_number_that_is_nan_at_both_stays() -> None:
    one, two = (program(rows, 1, (rows, float("nan"))) for rows in (2, 4))
    assert resize(one, two, Size(3)).ops[0].attrs[0][1][0] == 3


def test_negative_numbers_may_grow_too() -> None:
    assert resize(program(2, 1, -2), program(4, 1, -4), Size(3)) == program(3, 1, -3)


@pytest.mark.parametrize(
    ("one", "two", "rows"),
    [
        (program(2, 1), program(4, 2), 3),  # half a row
        (program(2, 2), program(4, 4), 0),  # nothing left
        (program(2, 1), program(4, 9), 1),  # less than nothing
        (program(2, 2, "same"), program(4, 4, "other"), 3),
        (program(2, 2, True), program(4, 4, False), 3),
        (program(2, 2, 0.5), program(4, 4, 0.25), 3),
        (program(2, 2, (1,)), program(4, 4, (1, 1)), 3),
        (program(2, 2, None), program(4, 4, 1), 3),
        (program(2, 2, 1), program(4, 4, 2), 3),
    ],
    ids=["half", "nothing", "negative", "text", "truth", "fraction", "length", "kind", "argument"],
)
def test_what_grows_along_no_line_is_no_program(one: Graph, two: Graph, rows: int) -> None:
    with pytest.raises(GraphError, match="is not known from that of 2 rows"):
        resize(one, two, Size(rows))


def test_other_ops_or_axes_are_no_program() -> None:
    one, two = program(2, 2), program(4, 4)
    flat = replace(two, values=tuple(replace(v, shape=(12,)) if v.name == "a" else v for v in two.values))
    for other in (flat, replace(two, ops=two.ops * 2)):
        with pytest.raises(GraphError, match="is not known from that of 2 rows"):
            resize(one, other, Size(3))


def test_two_captures_at_the_same_rows_show_nothing() -> None:
    with pytest.raises(GraphError, match="2 rows"):
        resize(program(2, 2), program(2, 2), Size(3))
