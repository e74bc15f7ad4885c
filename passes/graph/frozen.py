"""The end of the frozen layers: the values that a step may begin with, if they are known of every sample."""

from __future__ import annotations

from autopart.ir.graph import Graph


def frozen_end(graph: Graph) -> tuple[str, ...]:
    """Return the values at the end of the frozen prefix, in captured order; () if nothing is frozen.

    They depend on the rows of the inputs and on the model's tensors, but on nothing that learns; what reads them learns
    or follows from something that does, or returns them.  graph: with `Value.rows_axis` of its inputs.  O(reads).
    """
    learning = graph.learning_ops()
    tensors = {param.name for param in graph.params if param.kind != "constant"}
    rowed = {value.name for value in graph.values if value.name in graph.inputs and value.rows_axis is not None}
    of_model, learned = set[str](), set[str]()
    prefix: list[str] = []
    wanted = {*graph.outputs, *(value for _, value in graph.updates)}
    for op in graph.ops:
        if op.name in learning or not learned.isdisjoint(op.reads):
            learned.update(op.writes)
            wanted.update(op.reads)
            continue
        if not (of_model.isdisjoint(op.reads) and tensors.isdisjoint(op.params)):
            of_model.update(op.writes)
        if not rowed.isdisjoint(op.reads):
            rowed.update(op.writes)
        prefix.extend(op.writes)
    return tuple(name for name in prefix if name in of_model and name in rowed and name in wanted)
