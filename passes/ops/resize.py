"""The same program at another number of rows, from two captures.

Every size in the program (shapes, and numbers among the arguments) is taken to grow along a line through the two
captures; where that gives no whole number the model is no such program, and None is returned.  Wrong only for sizes
that depend on the rows in another way (rows against rows): two points cannot show that, so whoever runs a plan
compares it with a real capture (`files.match_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph, Literal, Op, Value


class _NoLine(Exception):
    pass


def resize(graph: Graph, other: Graph, rows: int) -> Graph | None:
    """`graph` at `rows` rows; None when its sizes do not lie on a line.

    Before: both are captures of one model, with equal structure, at different numbers of rows; costs are those of
    `graph` and are not changed.  O(ops + values).
    """
    if rows == graph.rows:
        return graph
    if graph.rows == other.rows:
        raise GraphError(f"two captures at {graph.rows} rows do not show how the model grows")
    scale = _Scale(graph.rows, other.rows, rows)
    try:
        values = tuple([scale.value(a, b) for a, b in zip(graph.values, other.values, strict=True)])
        ops = tuple([scale.op(op, twin) for op, twin in zip(graph.ops, other.ops, strict=True)])
    except (_NoLine, ValueError):
        return None
    return replace(graph, rows=rows, values=values, ops=ops)


def is_affine(graph: Graph, other: Graph, sizes: Iterable[int]) -> bool:
    """Whether `at_rows` has an answer at each of these numbers of rows.  O(ops + values + sizes * distinct numbers)."""
    pairs = _Pairs(graph.rows, other.rows)
    try:
        for a, b in zip(graph.values, other.values, strict=True):
            pairs.value(a, b)
        for op, twin in zip(graph.ops, other.ops, strict=True):
            pairs.op(op, twin)
        for rows in sizes:
            scale = _Scale(graph.rows, other.rows, rows)
            for low, high in pairs.found:
                scale.number(low, high)
    except (_NoLine, ValueError):
        return False
    return True


class _Scale:
    """From two numbers of rows to a third.  Few different shapes and arguments occur, so each is scaled once."""

    def __init__(self, low: int, high: int, rows: int) -> None:
        self._up, self._over = rows - low, high - low
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[tuple[int, ...], int]] = {}

    def number(self, a: int, b: int) -> int:
        grown, rest = divmod((b - a) * self._up, self._over)
        if rest or (a > 0) != (a + grown > 0):
            raise _NoLine
        return a + grown

    def value(self, a: Value, b: Value) -> Value:
        if a.shape == b.shape:
            return a
        key = a.shape, b.shape, a.size_bytes
        known = self._known.get(key)
        if known is None:
            shape = tuple([self.number(x, y) for x, y in zip(a.shape, b.shape, strict=True)])
            item = a.size_bytes // max(1, math.prod(a.shape))
            known = self._known[key] = shape, item * math.prod(shape)
        return Value(a.name, known[0], a.dtype, known[1], a.grad, a.rows_axis)  # `replace` takes four times as long

    def op(self, a: Op, b: Op) -> Op:
        if a.attrs == b.attrs:
            return a
        attrs = [(key, self.literal(x, y)) for (key, x), (_, y) in zip(a.attrs, b.attrs, strict=True)]
        return replace(a, attrs=tuple(attrs))

    def literal(self, a: Literal, b: Literal) -> Literal:
        if a == b:
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple([self.literal(x, y) for x, y in zip(a, b, strict=True)])
        if type(a) is int and type(b) is int:
            return self.number(a, b)
        raise _NoLine


class _Pairs(_Scale):
    """Collects the numbers that grow, instead of scaling them."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(low, high, low)
        self.found: set[tuple[int, int]] = set()

    def number(self, a: int, b: int) -> int:
        self.found.add((a, b))
        return a
