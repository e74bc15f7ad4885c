"""The graph of a stage's code, copied from the captured one; each recomputed group is one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import fx, nn

from autopart.capture.trace.grouped_products import kernel_of
from autopart.rng import keyed_rows
from autopart.runtime.stages.recomputation import RecomputedGroup
from autopart.runtime.stages.slice_functions import Rows
from autopart.stagecode.memory import laid_for


def convex_groups(readers: Mapping[str, Collection[str]], groups: Sequence[Collection[str]]) -> list[set[str]]:
    """Drop from each group the ops that would make it non-convex, so that each group can run as one op.

    readers: the ops that read each op, in order.  A dropped op (a mask or a position table that another block reads
    too) runs outside its group, and its result is kept.  Afterwards no path leaves a group and comes back, not even
    through other groups.  O(groups * (ops + reads)).
    """
    after = nx.DiGraph({op: list(them) for op, them in readers.items()})
    before = after.reverse(copy=False)
    found: list[set[str]] = []
    for number, group in enumerate(groups):
        inside = set(group)
        behind = _reached(after, inside) - inside  # what waits for the group
        inside -= _reached(before, behind & _reached(before, inside))  # ... and is waited for by it
        found.append(inside)
        for op in inside:  # through a group that runs as one op, each of its ops reaches each
            after.add_edges_from(((op, f"group {number}"), (f"group {number}", op)))
    return found


def _reached(steps: nx.DiGraph, start: Collection[str]) -> set[str]:
    """Return these ops and all that steps from them lead to."""
    return set(chain.from_iterable(nx.bfs_layers(steps, start)))


Reads = Mapping[tuple[fx.Node, fx.Node], tuple[int, Callable[..., torch.Tensor]]]
"""The adjusted reads, (op, what it reads): the op reads adjust(value, number of the micro-batch at this place)."""
Draws = Mapping[fx.Node, Rows]
"""Random ops that draw for all replicas, and how a replica takes its rows."""


def numbers_of(nodes: Iterable[fx.Node], reads: Reads) -> tuple[int, ...]:
    """Return the places of the numbers that these nodes take, ascending."""
    chosen = set(nodes)
    return tuple(sorted({place for (node, _), (place, _) in reads.items() if node in chosen}))


def stage_graph(
    inside: Sequence[fx.Node],
    outside: Sequence[fx.Node],
    results: Sequence[fx.Node],
    device: torch.device,
    groups: Sequence[Collection[str]] = (),
    adjusted: Reads = MappingProxyType({}),
    drawn: Draws = MappingProxyType({}),
) -> fx.GraphModule:
    """Return code that takes `outside` and numbers, and returns `results`, made of copies of the nodes `inside`.

    groups: names of nodes that run again in the backward.  adjusted: reads that take a number; the code takes those of
    `numbers_of`, in order.  drawn: random ops that draw for all replicas.  Devices that are constants in the captured
    graph become `device`.  O(nodes), with groups O(groups * nodes).
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in outside}
    numbers = {place: graph.placeholder(f"number_{place}") for place in numbers_of(inside, adjusted)}
    bodies: dict[str, RecomputedGroup] = {}
    for unit, nodes in _units(inside, groups):
        if not unit:
            for node in nodes:
                _copy(node, graph, env, numbers, adjusted, device, drawn)
            continue
        made = set(nodes)
        reads = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in made))
        writes = [node for node in nodes if node in results or not made.issuperset(node.users)]
        bodies[unit] = RecomputedGroup(stage_graph(nodes, reads, writes, device, adjusted=adjusted, drawn=drawn))
        given = [env[node] for node in reads] + [numbers[place] for place in numbers_of(nodes, adjusted)]
        call = graph.call_module(unit, tuple(given))
        env |= {node: graph.call_function(operator.getitem, (call, place)) for place, node in enumerate(writes)}
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule(nn.ModuleDict(bodies), graph)


def _units(inside: Sequence[fx.Node], groups: Sequence[Collection[str]]) -> Iterator[tuple[str, Sequence[fx.Node]]]:
    """Yield (name, nodes) of each recomputed group, and ("", nodes) of other ops, in an order that can run."""
    if not groups:
        yield "", inside
        return
    chosen = set(inside)
    nodes_of: dict[str, list[fx.Node]] = {}
    for node in inside:
        nodes_of.setdefault(_op_of(node), []).append(node)
    readers = {
        op: {_op_of(user) for node in nodes for user in node.users if user in chosen} - {op}
        for op, nodes in nodes_of.items()
    }
    unit = {op: op for op in nodes_of}
    members: dict[str, list[fx.Node]] = {}
    for number, group in enumerate(convex_groups(readers, groups)):
        unit.update(dict.fromkeys(group, f"recompute_{number}"))
    for op, nodes in nodes_of.items():
        members.setdefault(unit[op], []).extend(nodes)
    order = nx.DiGraph()
    order.add_nodes_from(members)
    order.add_edges_from(
        (unit[op], unit[reader]) for op in readers for reader in readers[op] if unit[op] != unit[reader]
    )
    place = {name: number for number, name in enumerate(members)}
    for name in nx.lexicographical_topological_sort(order, key=place.__getitem__):
        yield "" if name in nodes_of else name, members[name]


def _op_of(node: fx.Node) -> str:
    """Return the op that a node belongs to; picking one of several results belongs to the op that makes them."""
    while node.target is operator.getitem:
        (node,) = node.all_input_nodes
    return node.name


def _copy(
    node: fx.Node,
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    numbers: Mapping[int, fx.Node],
    adjusted: Reads,
    device: torch.device,
    drawn: Draws,
) -> None:
    def read(arg: fx.Node) -> fx.Node:
        if (node, arg) not in adjusted:
            return laid_for(node, arg, env[arg])
        place, adjust = adjusted[node, arg]
        return graph.call_function(adjust, (env[arg], numbers[place]))

    def moved(arg: object) -> object:
        return device if isinstance(arg, torch.device) else arg

    copy = env[node] = graph.node_copy(node, read)
    copy.meta.setdefault("op", node.name)  # it may have another name here
    copy.target = kernel_of(node.target)
    if node in drawn:
        draw_for_all(copy, drawn[node])
    copy.args = fx.node.map_aggregate(copy.args, moved)  # type: ignore[arg-type]
    copy.kwargs = fx.node.map_aggregate(copy.kwargs, moved)  # type: ignore[arg-type]


def draw_for_all(copy: fx.Node, rows: Rows) -> None:
    """Let a copy of a random op draw for the rows of all replicas, and take its own rows."""
    copy.target, copy.args = keyed_rows, (*copy.args[:2], *rows, *copy.args[2:])


def text_of(body: fx.GraphModule) -> str:
    """Return the ops of a graph as text, equal for equal ops whatever their names.  O(nodes)."""
    number: dict[fx.Node, int] = {}

    def argument(arg: Any) -> Any:
        return f"%{number[arg]}" if isinstance(arg, fx.Node) else repr(arg)

    lines = []
    for node in body.graph.nodes:
        number[node] = len(number)
        args = fx.node.map_aggregate((node.args, node.kwargs), argument)
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args}")
    return "\n".join(lines)
