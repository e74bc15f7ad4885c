"""Ops that are alike: models repeat their layers, so what holds for one op of a class is worked out once for all.

Two ops are alike when they do the same at the same shapes in both captures of the model, whatever the names; then they
do at every number of rows, since every size lies on the line through its two captures (`scale`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.graph import Graph, Literal


def op_classes(graph: Graph, other: Graph, also: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """The class of each op: a number counted from 0 in order of appearance.

    graph, other: captures of one model, of equal structure.  also: for each op, further values and parameters that
    count as its operands.  Of numbers among the arguments 1, 1.0 and True are the same.  O(size of the graph).
    """
    looks = _looks(graph, other)
    classes: dict[object, int] = {}
    found = []
    for op, twin, more in zip(graph.ops, other.ops, also, strict=True):
        place: dict[str, int] = {}  # names in order of appearance
        operands = tuple(
            [
                (place.setdefault(name, len(place)), looks.get(name, -1))
                for names in (op.reads, op.writes, op.params, more)
                for name in names
            ]
        )
        arguments = nameless(op.attrs, place)
        there = arguments if twin.attrs == op.attrs else nameless(twin.attrs, place)
        counts = len(op.reads), len(op.writes), len(op.params)
        key = op.target, op.random, counts, operands, arguments, there
        found.append(classes.setdefault(key, len(classes)))
    return tuple(found)


def first_of(classes: Sequence[int]) -> tuple[int, ...]:
    """For each class, the place of its first op."""
    first = {number: place for place, number in reversed(list(enumerate(classes)))}
    return tuple(first[number] for number in range(len(first)))


def nameless(literal: Literal, place: dict[str, int]) -> Literal:
    """The literal with operands by their number of appearance instead of their names."""
    if isinstance(literal, tuple):
        return tuple([nameless(item, place) for item in literal])
    if isinstance(literal, str) and literal[:1] == "%":
        return f"%{place.setdefault(literal[1:], len(place))}"
    return literal


def _looks(graph: Graph, other: Graph) -> dict[str, int]:
    """What is known of each value and parameter besides its name, as a number."""
    numbers: dict[object, int] = {}
    looks: dict[str, int] = {}
    for v, twin in zip(graph.values, other.values, strict=True):
        look = v.shape, twin.shape, v.dtype, v.size_bytes, v.grad
        looks[v.name] = numbers.setdefault(look, len(numbers))
    for p in graph.params:
        look_of_param = p.shape, p.dtype, p.size_bytes, p.trainable, p.kind
        looks[p.name] = numbers.setdefault(look_of_param, len(numbers))
    return looks
