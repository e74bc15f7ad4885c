"""Numbers of a batch that can be known before the step: how many tokens count, the mean of a mask.

Where a loss uses one otherwise than as the divisor of a mean, every micro-batch is given it as it is for the whole
batch, and it is a constant then.
"""

from __future__ import annotations

import math

from autopart.ir.graph import Graph


def of_inputs_alone(graph: Graph) -> frozenset[str]:
    """The values that follow from inputs, constants and frozen parameters, without random numbers.  O(ops)."""
    params, updated = graph.param_map(), {buffer for buffer, _ in graph.updates}
    found = set(graph.inputs)
    for op in graph.ops:
        fixed = not op.random and not any(params[name].trainable or name in updated for name in op.params)
        if fixed and found.issuperset(op.reads):
            found.update(op.writes)
    return frozenset(found)


def numbers_of_inputs(graph: Graph) -> frozenset[str]:
    """Of those the single numbers, but not what a buffer's new value depends on: it follows micro-batch by micro-batch.
    O(ops)."""
    kept = {value for _, value in graph.updates}
    for op in reversed(graph.ops):
        if kept.intersection(op.writes):
            kept.update(op.reads)
    single = {value.name for value in graph.values if math.prod(value.shape) == 1}
    return frozenset((of_inputs_alone(graph) & single) - kept - set(graph.inputs))
