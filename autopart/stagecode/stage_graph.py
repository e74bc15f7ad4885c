"""The graph of a stage's code, copied from the captured one; each recomputed group is one call.

Of a stage with replicas each draws random numbers for the whole micro-batch, and takes its own rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
import torch
from torch import fx, nn

from autopart.capture import Captured
from autopart.capture.trace.grouped_products import kernel_of
from autopart.ir.errors import RefusedError
from autopart.passes.ops.table import op_name
from autopart.planning.derive.reduction import Layouts
from autopart.rng import keyed, keyed_rows
from autopart.runtime.stages.slice_functions import Rows
from autopart.runtime.stages.stage_module import RecomputedGroup


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
            return env[arg]
        place, adjust = adjusted[node, arg]
        return graph.call_function(adjust, (env[arg], numbers[place]))

    def moved(arg: object) -> object:
        return device if isinstance(arg, torch.device) else arg

    copy = env[node] = graph.node_copy(node, read)
    copy.target = kernel_of(node.target)
    if node in drawn:
        draw_for_all(copy, drawn[node])
    copy.args = fx.node.map_aggregate(copy.args, moved)  # type: ignore[arg-type]
    copy.kwargs = fx.node.map_aggregate(copy.kwargs, moved)  # type: ignore[arg-type]


def draw_for_all(copy: fx.Node, rows: Rows) -> None:
    """Let a copy of a random op draw for the rows of all replicas, and take its own rows."""
    op, number, *args = copy.args
    copy.target, copy.args = keyed_rows, (op, number, *rows, *args)


BY_SHAPE = frozenset(
    (
        *("dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu", "rrelu", "rrelu_with_noise"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"),
        *("bernoulli", "normal", "normal_functional", "uniform", "exponential", "multinomial"),
    )
)
"""Ops that draw the same count of numbers whatever the values are, so the rows of other replicas may hold anything."""


def draws_of(captured: Captured, ops: Collection[str], layouts: Layouts) -> Draws:
    """Return how the random ops among `ops` take their rows.  layouts: of the values that they read and write.

    Raises RefusedError for an op whose count of numbers may depend on values.  O(nodes).
    """
    found: dict[fx.Node, Rows] = {}
    for node in captured.module.graph.nodes:
        if node.op != "call_function" or node.target is not keyed or node.name not in ops:
            continue
        rows = _rows(captured, node, layouts)
        if any(rows[0]) or any(rows[1]):
            if op_name(str(node.args[0])) not in BY_SHAPE:
                op = captured.graph.op_map()[node.name]
                raise RefusedError(
                    f"{op_name(op.target)} cannot be run by replicas of a stage",
                    where=f"module {op.module} at {op.where}",
                    why="how many random numbers it draws may depend on values that other replicas have",
                    fix="use replicas=1, or draw the numbers with torch.rand or torch.randn",
                )
            found[node] = rows
    return found


def _rows(captured: Captured, node: fx.Node, layouts: Layouts) -> Rows:
    names = captured.names
    given: list[tuple[int, int] | None] = []

    def see(arg: fx.Node) -> fx.Node:
        given.append(None if arg.name in names.params else _pair(layouts, names.value(arg)))
        return arg

    target: Any
    target, _, *args = node.args
    fx.node.map_arg((tuple(args), node.kwargs), see)
    example = node.meta["val"]
    made: list[tuple[int, int] | None]
    if isinstance(example, torch.Tensor):
        made = [_pair(layouts, names.value(node))]
    else:
        made = [None] * len(example)
        for user in node.users:
            if user.target is operator.getitem:
                made[user.args[1]] = _pair(layouts, names.value(user))  # type: ignore[index]
    arguments = [argument.name for argument in target._schema.arguments]
    return tuple(given), tuple(made), arguments.index("size") if "size" in arguments else None


def _pair(layouts: Layouts, value: str) -> tuple[int, int] | None:
    layout = layouts[value]
    return None if layout is None else (layout.axis, layout.stride)


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
