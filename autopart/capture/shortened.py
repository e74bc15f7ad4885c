"""A captured program that begins behind its frozen layers: values that these make are inputs of the batch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import fx

from autopart.capture.capture import Captured
from autopart.capture.trace.to_graph import results_of
from autopart.ir.errors import RefusedError
from autopart.ir.graph import check


def without_prefix(captured: Captured, kept: Sequence[str]) -> Captured:
    """Return the program that reads the values `kept` instead of computing them, as further inputs under their names.

    All other names stay.  Raises RefusedError if what is left out learns.  O(nodes).
    """
    graph = captured.graph
    makes, learning = graph.ops_between((), kept), graph.learning_ops()
    op = next((op for op in graph.ops if op.name in learning & makes), None)
    missing = set(kept) - graph.value_map().keys()
    if op is not None or missing:
        raise RefusedError(
            "the plan that runs begins behind layers that were frozen, and this batch does not",
            where=f"module {op.module} at {op.where}" if op else f"{len(missing)} values are not in its program",
            why="they learn again" if op else "another program runs for such a batch",
            fix="call pipe.replan(optimizer) on every rank: the next plan begins where the frozen layers end now",
        )
    behind = graph.ops_between(kept, {*graph.outputs, *(value for _, value in graph.updates)})
    used = (name for op in graph.ops if op.name in makes for name in op.params)
    inputs = (*graph.inputs, *kept)
    values = graph.value_map()
    there = {*inputs, *(name for op in graph.ops if op.name in behind for name in op.writes)}
    order = [*inputs, *(value.name for value in graph.values if value.name in there and value.name not in inputs)]
    shorter = replace(
        graph,
        values=tuple(values[name] for name in order),
        ops=tuple(op for op in graph.ops if op.name in behind),
        inputs=inputs,
        before=tuple(dict.fromkeys(name for name in used if captured.names.kinds[name] != "constant")),
    )
    module = _module(captured, behind, kept)
    names = replace(captured.names, inputs={**captured.names.inputs, **{name: name for name in kept}})
    groups = (tuple(name for name in group if name in behind) for group in captured.checkpointed)
    return replace(
        captured, module=module, graph=check(shorter), names=names,
        checkpointed=tuple(group for group in groups if group),
    )  # fmt: skip


def _module(captured: Captured, behind: Collection[str], kept: Sequence[str]) -> fx.GraphModule:
    """Return the code of the ops `behind`, with an input for each of the values `kept`, behind the other inputs."""
    before = list(captured.module.graph.nodes)
    by_value = {captured.names.value(node): node for call in before if call.op == "call_function"
                for node in results_of(call)}  # fmt: skip
    made = fx.Graph()
    found = {node: made.node_copy(node) for node in before if node.op == "placeholder"}
    for name in kept:
        node = by_value[name]
        found[node] = made.create_node("placeholder", node.name, name=node.name)
        found[node].meta = copy.copy(node.meta)
    wanted = {result for node in before if node.name in behind for result in (node, *results_of(node))}
    for node in before:
        if node not in found and (node.op == "output" or node in wanted):
            found[node] = made.node_copy(node, found.__getitem__)
    return fx.GraphModule(captured.module, made)
