"""Code of a stage with fewer ops: those that compute the same from inputs and constants, and counters, are merged.

Each layer of a model may build its own attention mask from the same padding, and count its own batches.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from autopart.runtime.stages.stage_module import StageModule

_aten = torch.ops.aten
_COUNTS = {_aten.add.Tensor, _aten.add.Scalar}


def merge_ops(code: StageModule, inputs: Collection[str]) -> StageModule:
    """Merge ops of the top level of a stage's code, in place; every result keeps its bits.  Return the code.

    inputs: names of the batch's inputs, which need no gradient, like constants.  O(nodes).
    """
    graph = code.module.graph
    if any(_writes(node.target) for node in graph.nodes):  # perhaps to memory that equal ops would share
        return code
    given = zip(graph.find_nodes(op="placeholder"), (*code.params, *code.inputs), strict=False)
    _merge_equal(graph, {node for node, name in given if name in inputs or name in code.constants})
    _merge_counters(graph)
    code.module.recompile()
    return code


def _merge_equal(graph: fx.Graph, plain: set[fx.Node]) -> None:
    """Let ops without gradients that are equal run once.  plain: gets the nodes that depend on plain ones alone."""
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node.target) or not plain.issuperset(node.all_input_nodes):
            continue
        plain.add(node)
        key = node.target, repr(node.args), repr(node.kwargs)
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            plain.discard(node)


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_pure(target: Any) -> bool:
    """Return whether an op computes the same from the same arguments each time, and changes none of them."""
    if target is operator.getitem:
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and not _writes(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _merge_counters(graph: fx.Graph) -> None:
    """Add to all counters at once: integer buffers whose sums with one number only leave the stage."""
    counters: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        for user in node.users:
            if user.target in _COUNTS and not user.kwargs and _only_leaves(user.users) and user.args[0] is node:
                step = user.args[1]
                if type(step) is int and len(node.users) == 1:
                    counters[step].append(user)
    end = graph.output_node()
    for step, sums in counters.items():
        if len(sums) < 2:
            continue
        with graph.inserting_before(end):
            together = graph.call_function(_aten._foreach_add.Scalar, ([each.args[0] for each in sums], step))
            for place, each in enumerate(sums):
                each.replace_all_uses_with(graph.call_function(operator.getitem, (together, place)))
                graph.erase_node(each)


def _only_leaves(users: Iterable[fx.Node]) -> bool:
    return all(user.op == "output" for user in users)
