"""Costs of ops as compiled stages run them: the whole model is compiled in segments, and the segments are timed.

The time of a segment is divided among its ops like their times without compiling, since only whole segments exist.  The
code is found again on disk when the stages are compiled, if their micro-batches have as many rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autopart.capture import Captured
from autopart.costs.profiler import Program, kept_times, made_up_inputs, profile_code, with_times
from autopart.costs.sources import CostedGraph, auto
from autopart.files.cost_cache import OpTimes
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.passes.ops.casts import without_casts
from autopart.runtime.effects import first_line
from autopart.runtime.stages.compiled_segment import CompiledSegment
from autopart.session.code.inductor import Inductor
from autopart.session.code.split import stage_module
from autopart.session.code.stage_code import specs_of

BUDGET_S = 3.0
"""Seconds of the runs, without compiling."""


def compiled_costs(captured: Captured, device: Device) -> CostedGraph:
    """Measure times on this machine in compiled code; ops that are not compiled have their own times.

    A program that is too large or too slow for this process, or does not run on made-up inputs, gets the times of
    `costs="auto"`, and so does one on another kind of device or without weights.
    """
    plain = auto(captured, device)
    if plain.source != "measured":
        return plain
    graph, where = plain.graph, torch.device(device.kind)
    try:
        times = kept_times(graph, device, BUDGET_S, lambda: _measured(captured, graph, where), "compiled ")
    except Exception as error:  # an op may reject made-up inputs
        why = f"costs: compiled code cannot be measured, {type(error).__name__}: {first_line(error)}"
        return replace(plain, notes=(*plain.notes, why))
    if times is None:
        return plain
    note = f"costs: measured in compiled code, {len(times)} ops"
    return CostedGraph(without_casts(with_times(graph, times)), "compiled", (note,))


def _measured(captured: Captured, graph: Graph, where: torch.device) -> dict[str, OpTimes]:
    """Return the times of each op in compiled code.  graph: with the times of the ops by themselves."""
    everything = Stage(tuple(op.name for op in graph.ops), (0,))
    code = stage_module(captured, (), 0, everything, where, eager=False)
    code = Inductor(graph.op_map()).compile(code, captured.tensors, specs_of(graph), (), where)
    made, names = made_up_inputs(captured, where), captured.names
    nodes = captured.module.graph.find_nodes(op="placeholder")
    leaves = {names.params[node.name]: made[node.name] for node in nodes if node.name in names.params}
    given = {names.value(node): made[node.name] for node in nodes if node.name not in names.params}
    inputs = [*code.arguments(leaves), *(given[name] for name in code.inputs)]
    loss_at = code.outputs.index(graph.outputs[0])
    return _divided(code.module, graph, profile_code(Program(code.module, inputs, loss_at, where), BUDGET_S))


def _divided(module: fx.GraphModule, graph: Graph, times: Mapping[str, OpTimes]) -> dict[str, OpTimes]:
    """Return the times of each op.  times: of ops and of segments.  O(ops)."""
    costs = {op.name: (op.cost.fwd_ns, op.cost.bwd_ns) for op in graph.ops}
    found = {name: times.get(name, (1, 0)) for name in costs}  # a cast is made once a step, outside of the code
    for node in module.graph.find_nodes(op="call_module"):
        segment = module.get_submodule(str(node.target))
        assert isinstance(segment, CompiledSegment)
        inside = [inner.name for inner in segment.body.graph.nodes if inner.name in costs]
        factors = [
            whole / max(1, sum(costs[name][phase] for name in inside)) for phase, whole in enumerate(times[node.name])
        ]
        for name in inside:
            forward, backward = (round(costs[name][phase] * factors[phase]) for phase in (0, 1))
            found[name] = max(1, forward), backward
    return found
