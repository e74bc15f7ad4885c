"""Numbers of a batch that can be known before the step: how many tokens count, the mean of a mask.

Where a loss uses one otherwise than as the divisor of a mean, every micro-batch is given it as it is for the whole
batch, and it is a constant then.
"""

from __future__ import annotations

import math

from autopart.ir.graph import Graph


def of_inputs_alone(graph: Graph, *, frozen: bool = True) -> frozenset[str]:
    """The values that follow from inputs, constants and buffers, without random numbers; frozen: and from parameters
    that are not trained.  O(ops)."""
    updated = {buffer for buffer, _ in graph.updates}
    changing = updated.union(p.name for p in graph.params if p.trainable or (p.kind == "param" and not frozen))
    found = set(graph.inputs)
    for op in graph.ops:
        if not op.random and changing.isdisjoint(op.params) and found.issuperset(op.reads):
            found.update(op.writes)
    return frozenset(found)


def numbers_of_inputs(graph: Graph) -> frozenset[str]:
    """Of those the single numbers.  Not among them: what takes parameters, which would have to lie in the first stage,
    and what a buffer's new value depends on, which follows micro-batch by micro-batch.  O(ops)."""
    kept = {value for _, value in graph.updates}
    for op in reversed(graph.ops):
        if kept.intersection(op.writes):
            kept.update(op.reads)
    single = {value.name for value in graph.values if math.prod(value.shape) == 1}
    return frozenset((of_inputs_alone(graph, frozen=False) & single) - kept - set(graph.inputs))
