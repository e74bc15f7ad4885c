"""The same program at another number of rows, from two captures.

Every size in the program (shapes, and numbers among the arguments) is taken to grow along a line through the two
captures; where that gives no whole number the model is no such program, and None is returned.  Wrong only for sizes
that depend on the rows in another way (rows against rows): two points cannot show that, so whoever runs a plan
compares it with a real capture (`files.match_plan`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph, Literal, Value


class _NoLine(Exception):
    pass


def at_rows(graph: Graph, other: Graph, rows: int) -> Graph | None:
    """`graph` at `rows` rows; None when its sizes do not lie on a line.

    Before: both are captures of one model, with equal structure, at different numbers of rows; costs are those of
    `graph` and are not changed.  O(ops + values).
    """
    if rows == graph.rows:
        return graph
    if graph.rows == other.rows:
        raise GraphError(f"two captures at {graph.rows} rows do not show how the model grows")
    up, over = rows - graph.rows, other.rows - graph.rows

    def number(a: int, b: int) -> int:
        grown, rest = divmod((b - a) * up, over)
        if rest or (a > 0) != (a + grown > 0):
            raise _NoLine
        return a + grown

    def literal(a: Literal, b: Literal) -> Literal:
        if a == b:
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(literal(x, y) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int:
            return number(a, b)
        raise _NoLine

    def value(a: Value, b: Value) -> Value:
        if a.shape == b.shape:
            return a
        shape = tuple(number(x, y) for x, y in zip(a.shape, b.shape, strict=True))
        item = a.size_bytes // max(1, math.prod(a.shape))
        return replace(a, shape=shape, size_bytes=item * math.prod(shape))

    try:
        values = tuple(value(a, b) for a, b in zip(graph.values, other.values, strict=True))
        ops = tuple(
            op
            if op.attrs == twin.attrs
            else replace(
                op,
                attrs=tuple((k, literal(a, b)) for (k, a), (_, b) in zip(op.attrs, twin.attrs, strict=True)),
            )
            for op, twin in zip(graph.ops, other.ops, strict=True)
        )
    except (_NoLine, ValueError):
        return None
    return replace(graph, rows=rows, values=values, ops=ops)
