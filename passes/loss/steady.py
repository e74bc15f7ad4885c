"""Buffers that a step updates once, however many micro-batches it has."""

from __future__ import annotations

from autopart.ir.graph import Graph


def steady_updates(graph: Graph, other: Graph) -> frozenset[str]:
    """Return the buffers whose new value is the same in every micro-batch and for the whole batch, such as counters.

    It follows from parameters and such buffers alone, by the same ops with the same arguments at both numbers of rows,
    and no other buffer's new value needs it.  other: the program at another number of rows, op by op.
    O(reads · buffers).
    """
    values, shapes, others = dict(graph.updates), graph.value_map(), other.value_map()
    owner = {p.name: p.same_as or p.name for p in graph.params}
    constants = {p.name for p in graph.params if p.kind == "constant"}  # may hold a number of rows
    by_rows = {
        op.name
        for op, twin in zip(graph.ops, other.ops, strict=True)
        if op.random
        or op.attrs != twin.attrs
        or not constants.isdisjoint(op.params)
        or any(shapes[a].shape != others[b].shape for a, b in zip(op.writes, twin.writes, strict=True))
    }
    steady, before = set(values), set[str]()
    while before != steady:
        before, moving = set(steady), set(graph.inputs)
        changing = {owner[buffer] for buffer in values.keys() - steady}
        for op in graph.ops:
            if op.name in by_rows or not (moving.isdisjoint(op.reads) and changing.isdisjoint(op.params)):
                moving.update(op.writes)
        steady = {buffer for buffer in steady if values[buffer] not in moving}
        needed = graph.ops_between((), [values[buffer] for buffer in values.keys() - steady])
        read = {name for op in graph.ops if op.name in needed for name in op.params}
        steady = {buffer for buffer in steady if owner[buffer] not in read}
    return frozenset(steady)
