"""Code of a stage with fewer ops: those that compute the same from inputs and constants, and counters, are merged.

Each layer of a model may build its own attention mask from the same padding, and count its own batches.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autopart.capture.trace.lower import is_random
from autopart.runtime.stages.stage_module import StageModule

_aten = torch.ops.aten
_COUNTS = {_aten.add.Tensor, _aten.add.Scalar}


def merge_ops(code: StageModule, inputs: Collection[str]) -> StageModule:
    """Merge ops of the top level of a stage's code, in place; every result keeps its bits.  Return the code.

    inputs: names of the batch's inputs, which need no gradient, like constants.  O(nodes).
    """
    graph = code.module.graph
    if any(_writes(node) for node in graph.nodes):  # perhaps to memory that equal ops would share
        return code
    given = zip(graph.find_nodes(op="placeholder"), (*code.params, *code.inputs), strict=False)
    _merge_equal(graph, {node for node, name in given if name in inputs or name in code.constants})
    _merge_counters(graph, len(code.updates))
    code.module.recompile()
    return code


def _merge_equal(graph: fx.Graph, plain: set[fx.Node]) -> None:
    """Let ops without gradients that are equal run once.  plain: gets the nodes that depend on plain ones alone."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_pure(node) or not plain.issuperset(node.all_input_nodes):
            continue
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is node:
            plain.add(node)
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_pure(node: fx.Node) -> bool:
    """Return whether an op computes the same from the same arguments each time; none of them writes."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and not is_random(node)
    return target is operator.getitem


def _merge_counters(graph: fx.Graph, updates: int) -> None:
    """Add to all counters at once: buffers whose new value is their sum with a number.

    updates: number of buffers that the code returns new values of, after its other results.
    """
    end = graph.output_node()
    results: Any = end.args[0]
    counters: dict[int, list[fx.Node]] = defaultdict(list)
    for result in dict.fromkeys(results[len(results) - updates :]):
        if result.target in _COUNTS and set(result.users) == {end} and not result.kwargs:
            buffer, step = result.args
            if type(step) is int and buffer.op == "placeholder":
                counters[step].append(result)
    for step, sums in counters.items():
        if len(sums) < 2:
            continue
        with graph.inserting_before(end):
            together = graph.call_function(_aten._foreach_add.Scalar, ([each.args[0] for each in sums], step))
            for place, each in enumerate(sums):
                each.replace_all_uses_with(graph.call_function(operator.getitem, (together, place)))
                graph.erase_node(each)
