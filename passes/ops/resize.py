"""Derive a program at another size from two sizes at which it is known.

Every number in the program (of shapes, and among the arguments) is taken to grow along a line through the two; where
that gives a fraction the program is not known.  Wrong only for numbers that depend on the rows in another way (rows
times rows): two points cannot show that, so before a plan is run it is compared with a real capture
(`files.plans.match_plan`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph, Literal, Op, Size, Value, alike


class _NoLine(Exception):
    pass


def resize(graph: Graph, other: Graph | None, size: Size) -> Graph:
    """`graph` at `size`.  O(ops + values).

    Before: both are captures of one model, with equal structure, at different numbers of rows of equal length; without
    `other` only the size of `graph` is known.  Costs are those of `graph` and are not changed.  Raises GraphError where
    the numbers of the program do not lie on a line.
    """
    if size == graph.size:
        return graph
    try:
        if other is None or other.rows == graph.rows or not graph.size.tokens == other.size.tokens == size.tokens:
            raise _NoLine
        scale = _Scale(graph.rows, other.rows, size.rows)
        values = tuple([scale.value(a, b) for a, b in zip(graph.values, other.values, strict=True)])
        ops = tuple([scale.op(op, twin) for op, twin in zip(graph.ops, other.ops, strict=True)])
    except (_NoLine, ValueError):
        raise GraphError(f"the program of {size} is not known from that of {graph.size}") from None
    return replace(graph, size=size, values=values, ops=ops)


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
        if alike(a, b):
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple([self.literal(x, y) for x, y in zip(a, b, strict=True)])
        if type(a) is int and type(b) is int:
            return self.number(a, b)
        raise _NoLine
