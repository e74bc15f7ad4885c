"""Classes of equal ops: models repeat their layers, so that costs are computed once for each class.

Two ops are equal if they have the same target, arguments and shapes in both captures of the model, whatever the names;
then they have at every number of rows, since every size lies on the line through the two captures (`resize`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.graph import Graph, Literal


def op_classes(
    graph: Graph, other: Graph, also: Sequence[tuple[str, ...]], amounts: Sequence[object] = ()
) -> tuple[int, ...]:
    """The class of each op: a number counted from 0 in order of appearance.

    graph, other: captures of one model, of equal structure.  also: for each op, further values and parameters that
    count as its operands.  amounts: for each op, what else its cost depends on.  1, 1.0 and True are equal as
    arguments.  O(size of the graph).
    """
    looks = _looks(graph, other)
    classes: dict[object, int] = {}
    found = []
    rest = amounts or (None,) * len(graph.ops)
    for op, twin, more, amount in zip(graph.ops, other.ops, also, rest, strict=True):
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
        key = op.target, op.random, counts, operands, arguments, there, amount
        found.append(classes.setdefault(key, len(classes)))
    return tuple(found)


def first_of(classes: Sequence[int]) -> tuple[int, ...]:
    """The place of the first op of each class."""
    first = {number: place for place, number in reversed(list(enumerate(classes)))}
    return tuple(first[number] for number in range(len(first)))


def nameless(literal: Literal, place: dict[str, int]) -> Literal:
    """The literal with operands numbered in order of appearance instead of named."""
    if isinstance(literal, tuple):
        return tuple([nameless(item, place) for item in literal])
    if isinstance(literal, str) and literal[:1] == "%":
        return f"%{place.setdefault(literal[1:], len(place))}"
    return literal


def _looks(graph: Graph, other: Graph) -> dict[str, int]:
    """For each value and parameter, a number that stands for everything but its name."""
    numbers: dict[object, int] = {}
    looks: dict[str, int] = {}
    for v, twin in zip(graph.values, other.values, strict=True):
        look = v.shape, twin.shape, v.dtype, v.size_bytes, v.grad
        looks[v.name] = numbers.setdefault(look, len(numbers))
    for p in graph.params:
        look_of_param = p.shape, p.dtype, p.size_bytes, p.trainable, p.kind
        looks[p.name] = numbers.setdefault(look_of_param, len(numbers))
    return looks
