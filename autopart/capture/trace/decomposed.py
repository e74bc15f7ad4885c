"""What torch makes of each distinct op of a program: one small program of all of them, decomposed by torch itself.

Ops under autocast stand in a region of that autocast there, which makes their casts ops of their own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from autopart.capture.trace.autocast import Autocast, decomposed_under


@dataclass(frozen=True)
class Call:
    """One op of the program.  operands: the tensors that it reads; key: equal for ops that become the same; autocast:
    that it runs in."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[fx.Node, ...]
    key: Hashable
    autocast: Autocast | None


@dataclass(frozen=True)
class Answer:
    """What becomes of an op.  operands: the nodes that stand for its operands; nodes: the ops, in order; results: its
    results among both."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def answers(calls: list[Call]) -> dict[Hashable, Answer]:
    """What torch makes of each distinct call, asked with one program of all of them.  Raises NotImplementedError."""
    distinct = {call.key: call for call in calls}
    found = {key: answer for key, call in distinct.items() if (answer := _answer_under(call)) is not None}
    asked = {key: call for key, call in distinct.items() if key not in found}
    graph = fx.Graph()
    operands = {key: [_operand(graph, operand) for operand in call.operands] for key, call in asked.items()}
    regions: dict[str, fx.GraphModule] = {}
    results: dict[Hashable, list[fx.Node]] = {}
    for state in dict.fromkeys(call.autocast for call in asked.values()):
        keys = [key for key, call in asked.items() if call.autocast == state]
        if state is None:
            results |= {key: _put(graph, asked[key], operands[key]) for key in keys}
        else:
            results |= _put_in_region(graph, regions, state, {key: asked[key] for key in keys}, operands)
    graph.output(tuple(node for key in asked for node in results[key]))
    made = _program(graph, regions).run_decompositions({}).graph_module.graph
    return found | _read(made, list(asked), [len(operands[k]) for k in asked], [len(results[k]) for k in asked])


def _put(graph: fx.Graph, call: Call, operands: list[fx.Node]) -> list[fx.Node]:
    """The call copied into a graph, on operands of its own; its results."""
    env = dict(zip(call.operands, operands, strict=True))
    args, kwargs = fx.map_arg((call.args, call.kwargs), env.__getitem__)
    node = graph.create_node("call_function", call.node.target, args, kwargs)
    node.meta = dict(call.node.meta)
    return _results(graph, node)


def _put_in_region(
    graph: fx.Graph,
    regions: dict[str, fx.GraphModule],
    state: Autocast,
    calls: Mapping[Hashable, Call],
    operands: Mapping[Hashable, list[fx.Node]],
) -> dict[Hashable, list[fx.Node]]:
    """Calls copied into a region of autocast in a graph; the results of each.  regions: takes the region's body."""
    body = fx.Graph()
    given: list[fx.Node] = []
    inner: dict[Hashable, list[fx.Node]] = {}
    for key, call in calls.items():
        places = []
        for operand in operands[key]:
            places.append(body.placeholder(f"y{len(given)}"))
            places[-1].meta = dict(operand.meta)
            given.append(operand)
        inner[key] = _put(body, call, places)
    made = [node for nodes in inner.values() for node in nodes]
    body.output(tuple(made))
    name = f"region_{len(regions)}"
    regions[name] = fx.GraphModule({}, body)
    settings = (state.device_type, state.dtype, True, False)
    whole = graph.call_function(wrap_with_autocast, (*settings, graph.get_attr(name), *given))
    whole.meta["val"] = tuple(node.meta["val"] for node in made)
    picks = []
    for place, node in enumerate(made):
        picks.append(graph.call_function(operator.getitem, (whole, place)))
        picks[-1].meta["val"] = node.meta["val"]
    queue = iter(picks)
    return {key: list(itertools.islice(queue, len(nodes))) for key, nodes in inner.items()}


def _answer_under(call: Call) -> Answer | None:
    """What becomes of a composite op whose casts would be lost if it stayed whole; None where torch is to be asked."""
    if call.autocast is None or not isinstance(call.node.target, torch._ops.OpOverload):
        return None
    graph = fx.Graph()
    fakes = [_operand(graph, operand).meta["val"] for operand in call.operands]
    traced = decomposed_under(call.autocast, call.node.target, call.args, call.kwargs, fakes)
    if traced is None:
        return None
    places = tuple(node for node in traced.nodes if node.op == "placeholder")
    results = next(node for node in traced.nodes if node.op == "output").args[0]
    nodes = tuple(node for node in traced.nodes if node.op == "call_function")
    if any(node.op == "get_attr" for node in traced.nodes):
        raise NotImplementedError
    return Answer(places, nodes, tuple(results) if isinstance(results, (tuple, list)) else (results,))


def _operand(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with value.fake_mode:
        fresh = torch.empty(0, dtype=value.dtype, device=value.device)
        fresh = fresh.as_strided(value.shape, value.stride(), value.storage_offset())
    node = graph.placeholder(f"x{len(graph.nodes)}")
    node.meta["val"] = fresh.requires_grad_(like.op == "placeholder" and value.requires_grad)
    return node


def _results(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    if not isinstance(value, (tuple, list)) or not all(isinstance(part, torch.Tensor) for part in value):
        raise NotImplementedError
    parts = []
    for place, part in enumerate(value):
        parts.append(graph.call_function(operator.getitem, (node, place)))
        parts[-1].meta = dict(node.meta, val=part)
    return parts


def _program(graph: fx.Graph, regions: Mapping[str, fx.GraphModule]) -> ExportedProgram:
    from torch._export.verifier import TrainingIRVerifier

    places = [node for node in graph.nodes if node.op == "placeholder"]
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    given, made = ([TensorArgument(node.name) for node in nodes] for nodes in (places, results))
    in_spec = pytree.tree_structure(((0,) * len(given), {}))
    out_spec = pytree.tree_structure((0,) * len(made))
    return ExportedProgram(
        root=fx.GraphModule(dict(regions), graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, arg, None) for arg in given],
            [OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in made],
        ),
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        constants={},
        verifiers=[TrainingIRVerifier],
    )


def _read(graph: fx.Graph, keys: list[Hashable], given: list[int], made: list[int]) -> dict[Hashable, Answer]:
    """The decomposed program taken apart again.  Every op is on one call's way from its operands to its results."""
    places = iter([node for node in graph.nodes if node.op == "placeholder"])
    results = iter(next(node for node in graph.nodes if node.op == "output").args[0])
    order = {node: number for number, node in enumerate(graph.nodes)}
    known: dict[Hashable, Answer] = {}
    for key, takes, makes in zip(keys, given, made, strict=True):
        own, out = tuple(itertools.islice(places, takes)), tuple(itertools.islice(results, makes))
        found: set[fx.Node] = set()
        queue = [*out]
        while queue:
            node = queue.pop()
            if node in found or node in own:
                continue
            if node.op != "call_function":
                raise NotImplementedError
            found.add(node)
            queue.extend(node.all_input_nodes)
        known[key] = Answer(own, tuple(sorted(found, key=order.__getitem__)), out)
    return known
