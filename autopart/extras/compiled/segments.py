"""The code of a stage, cut into segments for a compiler: runs of ops of one layer of the model.

Layers that are equal give equal segments, which share one compiled code, and the gradients of a layer's parameters are
complete when the backward of its segments has run, so that sums over replicas overlap with earlier layers.  Ops that
a compiler must not see stay between the segments, and run as without it: random ops, whose key is set from outside;
waits; sums over replicas; products whose weights get their gradients later; weights of losses, which are Python
numbers; ops that write to their arguments, or whose results' sizes depend on data; ops of other libraries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from autopart.capture.trace.lower import is_random
from autopart.ir.errors import RefusedError
from autopart.passes.ops.row import VIEW
from autopart.passes.ops.table import row_of
from autopart.runtime.stages.stage_module import RecomputedGroup

LEAST_KERNELS = 2
"""Of a segment; a call of compiled code costs more than it saves for fewer."""
_UNSUITED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def segmented(
    module: fx.GraphModule, paths: Mapping[str, str], make: Callable[[fx.GraphModule], nn.Module]
) -> fx.GraphModule:
    """Return code in which each segment is one call of what `make` makes of its ops; also in recomputed groups.

    paths: the module path of each op.  Results and their order stay.  Raises RefusedError for a random op without a
    key, whose numbers would be drawn while compiling.  O(nodes).
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    root = nn.ModuleDict()
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = graph.node_copy(node)
    for number, (nodes, compiled) in enumerate(_runs(module, paths)):
        if compiled:
            name = f"segment_{number}"
            body, reads, results = _body(nodes)
            root[name] = make(body)
            call = graph.call_module(name, tuple(env[node] for node in reads))
            env |= {node: graph.call_function(operator.getitem, (call, place)) for place, node in enumerate(results)}
            continue
        for node in nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "call_module":
                called = module.get_submodule(str(node.target))
                if isinstance(called, RecomputedGroup):
                    called = RecomputedGroup(segmented(called.body, paths, make))
                root[str(node.target)] = called
    (output,) = module.graph.find_nodes(op="output")
    graph.node_copy(output, env.__getitem__)
    return fx.GraphModule(root, graph)


def _runs(module: fx.GraphModule, paths: Mapping[str, str]) -> Iterator[tuple[list[fx.Node], bool]]:
    """Yield the nodes in an order that can run, cut where the layer changes, and whether each run is a segment."""
    runs: list[tuple[str | None, list[fx.Node]]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in run_of:  # stays with the op whose result it picks from
            run = run_of[node.args[0]]
        else:
            layer = _layer(paths.get(node.name, "")) if _is_suited(node) else None
            if not runs or runs[-1][0] != layer:
                runs.append((layer, []))
            run = runs[-1][1]
        run.append(node)
        run_of[node] = run
    for layer, nodes in runs:
        yield nodes, layer is not None and sum(map(_is_kernel, nodes)) >= LEAST_KERNELS


def _layer(path: str) -> str:
    """Return the module path up to the first number: a layer in a list of layers; "" outside of lists."""
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _is_suited(node: fx.Node) -> bool:
    """Return whether a compiler may see this op."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    if is_random(node):
        raise RefusedError(
            f"{op} draws random numbers in compiled code",
            where=node.name,
            why="it has no key, so its numbers would depend on when the code is compiled; this is a bug in autopart",
            fix='use backend="eager"',
        )
    return not op._schema.is_mutable and not _UNSUITED.intersection(op.tags)


def _is_kernel(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and row_of(str(node.target)).family != VIEW


def _body(nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Return the ops of a segment as code of its own, what it reads, and the nodes whose results it returns."""
    inside = set(nodes)
    reads = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))
    results = [node for node in nodes if not inside.issuperset(node.users) and not _gives_several(node)]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"arg_{place}") for place, node in enumerate(reads)}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule(nn.Module(), graph), reads, results


def _gives_several(node: fx.Node) -> bool:
    """Return whether an op gives several results, of which other nodes pick one each."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)
