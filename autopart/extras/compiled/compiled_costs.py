"""Costs of ops as compiled stages run them: the whole model is compiled in segments, and these are run and timed.

Only whole segments exist, so what one takes is divided among its ops: its time like their times without compiling, and
the bytes that it keeps for its backward like the bytes that its ops would keep.  A compiler keeps less than autograd:
it computes again what is cheap.  The code is found again on disk when the stages are compiled, if their micro-batches
have as many rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopart.capture import Captured
from autopart.capture.trace.grouped_products import kernel_of
from autopart.costs.measure import environment
from autopart.costs.profiler import Program, affordable, made_up_inputs, profile_code
from autopart.costs.sources import CostedGraph, auto
from autopart.extras.compiled.inductor import Inductor
from autopart.files.caches import OpCost, find_program, keep_program
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.casts import without_casts
from autopart.runtime.stages.compiled_segment import CompiledSegment
from autopart.runtime.watch.effects import first_line
from autopart.stagecode.split import stage_module
from autopart.stagecode.stage_code import specs_of

BUDGET_S = 3.0
"""Seconds of the runs, without compiling."""
_LARGEST_S = 4 * BUDGET_S
"""A program that is expected to take a quarter of this for one micro-batch is not run."""


def compiled_costs(captured: Captured, device: Device) -> CostedGraph:
    """Measure times and saved bytes on this machine in compiled code; ops that are not compiled have their own.

    A program that is too large or too slow for this process, or does not run on made-up inputs, gets the costs of
    `costs="auto"`, and so does one on another kind of device or without weights.
    """
    plain = auto(captured, device)
    if plain.source != "measured":
        return plain
    graph = plain.graph
    # Segments end where the layer changes, so modules count.
    program = f"{environment(device)}\n{graph.shape_digest()}\n{[op.module for op in graph.ops]}"
    key = hashlib.sha256(program.encode()).hexdigest()
    found, doubt = find_program(key), ""
    if found is None or len(found) != len(graph.ops):
        if not affordable(analytic_costs(captured.graph, device), device, _LARGEST_S):
            return replace(plain, notes=(*plain.notes, "costs: this program is too large to measure it compiled"))
        try:
            found, doubt = _measured(captured, graph, torch.device(device.device_type))
        except Exception as error:  # an op may reject made-up inputs
            why = f"costs: compiled code cannot be measured, {type(error).__name__}: {first_line(error)}"
            return replace(plain, notes=(*plain.notes, why))
        if not doubt:
            keep_program(key, found)
    note = f"costs: measured in compiled code, {len(found)} ops"
    ops = (
        replace(op, cost=replace(op.cost, fwd_ns=forward, bwd_ns=backward, saved_bytes=saved))
        for op, (forward, backward, saved) in zip(graph.ops, found, strict=True)
    )
    return CostedGraph(without_casts(replace(graph, ops=tuple(ops))), "compiled", tuple(filter(None, (note, doubt))))


def _measured(captured: Captured, graph: Graph, where: torch.device) -> tuple[tuple[OpCost, ...], str]:
    """Compile a program and run it; return costs, and a note if measurements disagree.  graph: with the costs of the
    ops by themselves.  Raises what its ops raise."""
    everything = Stage(tuple(op.name for op in graph.ops), (0,))
    code = stage_module(captured, (), 0, everything, where, eager=False)
    code = Inductor(graph.op_map()).compile(code, captured.tensors, specs_of(graph), (), where)
    made, names = made_up_inputs(captured, where), captured.names
    nodes = captured.module.graph.find_nodes(op="placeholder")
    leaves = {names.params[node.name]: made[node.name] for node in nodes if node.name in names.params}
    given = {names.value(node): made[node.name] for node in nodes if node.name not in names.params}
    inputs = [*code.arguments(leaves), *(given[name] for name in code.inputs)]
    profile = profile_code(Program(code.module, inputs, code.outputs.index(graph.outputs[0]), where), BUDGET_S)
    times = profile.times
    saved = saved_by_call(code.module, inputs)
    found = _divided(code.module, graph, {name: (*times[name], saved.get(name, 0)) for name in times})
    return tuple(found[op.name] for op in graph.ops), profile.doubt


def _divided(module: fx.GraphModule, graph: Graph, costs: Mapping[str, OpCost]) -> dict[str, OpCost]:
    """Return the costs of each op.  costs: of ops and of segments.  O(ops)."""
    alone = {op.name: (op.cost.fwd_ns, op.cost.bwd_ns, op.cost.saved_bytes) for op in graph.ops}
    found = {name: costs.get(name, (1, 0, 0)) for name in alone}  # a cast is made once a step, outside of the code
    for node in module.graph.find_nodes(op="call_module"):
        segment = module.get_submodule(str(node.target))
        assert isinstance(segment, CompiledSegment)
        inside = [inner.name for inner in segment.body.graph.nodes if inner.name in alone]
        parts = [_shares(whole, [alone[name][i] for name in inside]) for i, whole in enumerate(costs[node.name])]
        for name, forward, backward, saved in zip(inside, *parts, strict=True):
            found[name] = max(1, forward), backward, saved
    return found


def _shares(whole: int, parts: Sequence[int]) -> list[int]:
    """Divide a number in proportion to parts; evenly where all of them are 0."""
    total = sum(parts)
    return [round(whole * part / total) if total else whole // len(parts) for part in parts]


def saved_by_call(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the bytes that each call of a program keeps for its backward, by name of its node: the tensors that
    autograd saves.  Runs its forward once.

    Each storage counts once, for the first call that saves it, as in the table of ops; what the program is given
    (parameters, inputs) does not count.  Tensors that a custom autograd function hides from autograd are not seen.
    """
    saved = _Saved(inputs)
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        _NotedRun(module, saved).run(*inputs)
    saved.known.clear()
    return saved.bytes_of


class _Saved:
    """What is saved.  bytes_of: by name of a node, what it keeps and no node before it.  node: the one that runs.

    Autograd keeps this object as long as its graph, so it must not hold a result: nobody would free either.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.node = ""
        self.bytes_of: dict[str, int] = {}
        # Storages stay alive meanwhile, so that no address is used twice.
        self.known = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in given}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of a tensor that is saved, and return what is kept."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known[storage.data_ptr()] = storage
            self.bytes_of[self.node] = self.bytes_of.get(self.node, 0) + storage.nbytes()
        return tensor.detach()  # a result that its own op saves would keep that op alive


class _NotedRun(fx.Interpreter):
    """Runs a module op by op, and says which one runs."""

    def __init__(self, module: fx.GraphModule, saved: _Saved) -> None:
        super().__init__(module)
        self._saved = saved

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self._saved.node = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op with the kernel that the runtime uses."""
        return kernel_of(target)(*args, **kwargs)
