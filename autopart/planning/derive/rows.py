"""The batch axis of each value, found by comparing captures of the model at two numbers of rows.

They also show every number in the program that depends on the rows (a loss divided by `x.shape[0]`), which the loss
analysis has to know.
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.errors import OtherProgramError
from autopart.ir.graph import Graph, Value


def mark_rows(graph: Graph, other: Graph) -> Graph:
    """Return `graph` with `Value.rows_axis` set, by comparison with a capture at another number of rows.  O(values).

    A value whose two shapes differ in several axes (every row against every row) keeps None.  Raises
    OtherProgramError if the two captures are different programs.
    """
    require_same_program(graph, other)
    shapes = other.value_map()
    values = tuple(replace(v, rows_axis=_axis(v, shapes[v.name])) for v in graph.values)
    return replace(graph, values=values)


def require_same_program(graph: Graph, other: Graph) -> None:
    """Raise OtherProgramError if two captures of one model are not the same program at two sizes."""
    mine, theirs = graph.ops, other.ops
    if graph.structure_digest() == other.structure_digest():
        shapes = other.value_map()  # squeeze() drops an axis at one size only
        ranks = {v.name for v in graph.values if len(v.shape) != len(shapes[v.name].shape)}
        if not ranks:
            return
        place = next((i for i, op in enumerate(mine) if ranks.intersection(op.writes)), None)
    else:
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.target != b.target), None)
    op = mine[place] if place is not None and place < len(mine) else None
    raise OtherProgramError(
        f"the model runs different operations on {graph.rows} and on {other.rows} rows",
        where=f"{op.target} in module {op.module} at {op.where}" if op else f"{len(mine)} and {len(theirs)} ops",
        why="one plan has to fit micro-batches of both sizes",
        fix="choose a batch size that micro_batches divides, with at least 2 rows in each micro-batch",
    )


def _axis(a: Value, b: Value) -> int | None:
    """Return the axis in which the shapes differ, if it is the only one."""
    differing = [axis for axis, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    return differing[0] if len(differing) == 1 else None
