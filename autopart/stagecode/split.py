"""Captured + Plan -> the code of a stage: the nodes of its ops, copied into a graph of their own (`stage_graph`).

Cuts fall anywhere in the flat graph.  Capture has run it on fake tensors with autograd to find which values carry a
gradient: where such a value crosses a cut, its gradient goes back to the stage that made it, and is summed there if it
has several readers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from autopart.capture import Captured
from autopart.capture.trace.to_graph import results_of
from autopart.ir.graph import Adjusted, Graph
from autopart.ir.plan import Stage
from autopart.ir.program import Edge
from autopart.passes.ops.casts import cast_parameter
from autopart.planning.derive.reduction import Layouts
from autopart.runtime.stages.products import are_faster
from autopart.runtime.stages.stage_module import Cast, StageModule, awaited, of_whole_batch, weighed
from autopart.stagecode.rewrites import accumulate_in_place, draws_of, merge_ops
from autopart.stagecode.stage_graph import Draws, Reads, numbers_of, stage_graph


def stage_module(
    captured: Captured,
    links: Sequence[Edge],
    stage: int,
    planned: Stage,
    device: torch.device,
    adjusted: Sequence[Adjusted] = (),
    layouts: Layouts = MappingProxyType({}),
    *,
    eager: bool = True,
    deferrable: bool = False,
    shard: Callable[[StageModule], StageModule] | None = None,
) -> StageModule:
    """Return the code of `stage`, which runs the ops of `planned` and exchanges values along these edges.

    adjusted: values that ops read with a factor of the micro-batch.  layouts: how values of random ops hold rows.
    eager: whether the ops run one by one: then products add the gradients of large weights themselves, and some ops are
    merged.  deferrable: whether products with small weights do so too, and in code that will be compiled: they can
    wait then, and a compiler does not see them; nor those that have a faster kernel (`stages.products`).  shard: lets
    code compute the part of one rank of several (`stagecode.shards`).
    Raises RefusedError for a random op that replicas cannot run.  O(nodes * (1 + recomputed groups)).
    """
    graph = captured.graph
    chosen = set(planned.ops)
    outputs = leaving(graph, links, stage, chosen)
    updates = own_updates(graph, chosen)
    casts = casts_of(graph, chosen, {*outputs, *(value for _, value in graph.updates)})
    # Without layouts no value is cut: a batch of one row runs whole on one replica, which draws for all of it.
    drawn = draws_of(captured, chosen, layouts) if planned.division.splits and layouts else {}
    code = cut(
        captured, chosen, outputs, device, updates=updates, groups=planned.recompute, adjusted=adjusted, casts=casts,
        drawn=drawn,
    )  # fmt: skip
    if shard is not None:
        code = shard(code)
    if eager:
        code = merge_ops(code, graph.inputs)
    if eager or deferrable or are_faster():
        code = accumulate_in_place(code, captured.tensors, deferrable=deferrable, eager=eager)
    return code


def leaving(graph: Graph, links: Iterable[Edge], stage: int, ops: Collection[str]) -> list[str]:
    """Return the values that `ops`, those of `stage`, compute for other stages or as outputs.  O(ops + values)."""
    sent = {value for edge in links if edge.src == stage for value in edge.values}
    wanted = sent | set(graph.outputs)
    written = {value for op in graph.ops if op.name in ops for value in op.writes}
    leaves = wanted & written
    return [value.name for value in graph.values if value.name in leaves]


def wait_for(code: StageModule, parameters: Collection[str]) -> None:
    """Insert a wait for each of these parameters before the first op that reads it (`stage_module.awaited`)."""
    graph = code.module.graph
    for name, given in zip(code.params, [node for node in graph.nodes if node.op == "placeholder"], strict=False):
        if name in parameters and given.users:
            with graph.inserting_before(next(node for node in graph.nodes if node in given.users)):
                ready = graph.call_function(awaited, (given,))
            given.replace_all_uses_with(ready, delete_user_cb=lambda user, ready=ready: user is not ready)
    code.module.recompile()


def casts_of(graph: Graph, ops: Collection[str], leaving: Collection[str]) -> dict[str, Cast]:
    """Return the ops that only cast a parameter for ops of the same stage.  leaving: values that leave the stage."""
    params = graph.param_map()
    found = {}
    for op in graph.ops:
        parameter = cast_parameter(op, params) if op.name in ops else None
        if parameter is not None and op.writes[0] not in leaving:
            found[op.name] = parameter, getattr(torch, str(dict(op.attrs)["dtype"]))
    return found


def own_updates(graph: Graph, ops: Collection[str]) -> tuple[str, ...]:
    """Return the buffers whose new value one of `ops` computes."""
    written = {value for op in graph.ops if op.name in ops for value in op.writes}
    return tuple(buffer for buffer, value in graph.updates if value in written)


def ancestors(graph: Graph, values: Iterable[str], among: Collection[str] | None = None) -> list[str]:
    """Return the ops that these values depend on, in captured order.  among: ops that count, None for all."""
    needed, ops = set(values), []
    for op in reversed(graph.ops):
        if needed.intersection(op.writes) and (among is None or op.name in among):
            ops.append(op.name)
            needed.update(op.reads)
    return ops[::-1]


def cut(
    captured: Captured,
    ops: Collection[str],
    outputs: Iterable[str],
    device: torch.device,
    *,
    updates: tuple[str, ...] = (),
    groups: Sequence[Collection[str]] = (),
    adjusted: Sequence[Adjusted] = (),
    casts: Mapping[str, Cast] = MappingProxyType({}),
    drawn: Draws = MappingProxyType({}),
) -> StageModule:
    """Return code that runs `ops` and returns `outputs`; it takes the values that these ops do not make.

    updates: buffers whose new values it returns too.  groups: ops that run again in the backward.  adjusted: as in
    `stage_module`.  casts: ops whose results are given, since they are equal in every micro-batch.  drawn: random ops
    that draw for other replicas too.
    """
    names = captured.names
    calls = [
        node
        for node in captured.module.graph.nodes
        if node.op == "call_function" and node.name in ops and node.name not in casts
    ]
    inside = set(calls)
    for call in calls:
        inside.update(node for node in call.users if node.target is operator.getitem)
    outside = _outside(captured, inside)
    given = {**names.params, **{name: f"cast {name}" for name in casts}}
    params = [node for node in outside if node.name in given]
    inputs = [node for node in outside if node.name not in given]
    groups = [[name for name in group if name not in casts] for group in groups]
    reads = adjusted_reads(captured, calls, adjusted)
    by_value = {names.value(result): result for call in calls for result in results_of(call)}
    by_name = {node.name: node for node in inside}
    results = [by_value[name] for name in outputs] + [by_name[names.updates[buffer]] for buffer in updates]
    ordered = [node for node in captured.module.graph.nodes if node in inside]
    return StageModule(
        stage_graph(ordered, params + inputs, results, device, groups, reads, drawn),
        tuple(given[node.name] for node in params),
        tuple(names.value(node) for node in inputs),
        tuple(outputs),
        updates,
        {
            name: captured.tensors[name].to(device)
            for name in dict.fromkeys(given[node.name] for node in params)
            if names.kinds.get(name) == "constant"
        },
        numbers_of(ordered, reads),
        {given[node.name]: casts[node.name] for node in params if node.name in casts},
    )


def adjusted_reads(captured: Captured, calls: Iterable[fx.Node], adjusted: Sequence[Adjusted]) -> Reads:
    """Return how each adjusted read, (op, what it reads), is adjusted, and by which number."""
    names = captured.names
    places = {(item.value, item.reader): place for place, item in enumerate(adjusted)}
    found = {}
    for call in calls if places else ():
        for arg in call.all_input_nodes:
            value = names.params.get(arg.name, names.value(arg))
            place = places.get((value, call.name), places.get((value, None)))
            if place is not None:
                found[call, arg] = place, of_whole_batch if adjusted[place].reader is None else weighed
    return found


def _outside(captured: Captured, inside: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes that `inside` reads and does not hold, in captured order."""
    read = {arg for node in inside for arg in node.all_input_nodes} - set(inside)
    return [node for node in captured.module.graph.nodes if node in read]
