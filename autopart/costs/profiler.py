"""Costs of ops measured inside the step: the captured program runs as it is, with a timer around each op.

An op that is measured alone finds its operands in the cache and memory that was just freed.  Here one micro-batch runs
forward op by op and backward node by node of autograd, gradients accumulating as in a step.  Then the program runs
without timers, and the times are scaled by one factor for the forward and one for the backward, so that they add up to
its time: the time of the engine and the allocator between ops is spread over the ops.

This is wrong if times depend on the inputs: integers are 0, floats around 1.  A program that is too large or too slow
for this process, or that does not run on such inputs, is left to `measure`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.capture import Captured
from autopart.capture.trace.grouped_products import kernel_of
from autopart.costs import measure
from autopart.costs.measure import clocked, environment, made_up, wait_for
from autopart.files.caches import OpTimes, keep_times, read_times
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.runtime.stages import products

_RUNS = 5
"""Most runs with timers and without, each after one to warm up; medians count."""
_MEMORY_SHARE = 3
"""A program that needs more than a third of the device's memory is not run."""


def profile_costs(captured: Captured, device: Device) -> tuple[Graph, tuple[str, ...]] | None:
    """Return the captured graph with measured costs, and notes on their source; None if the program cannot be run.

    A program expected to take a quarter of `BUDGET_S` for one micro-batch is not run.  Times of an earlier run are
    found on disk.  The model's parameters are read, never changed, and get no gradients.
    """
    if any(tensor.is_meta for tensor in captured.tensors.values()):
        return None  # there may be no memory for the whole program
    graph, kept = analytic_costs(captured.graph, device), read_times(environment(device))
    keys = {op.name: f"{graph.shape_digest()[:16]} {i}" for i, op in enumerate(graph.ops)}
    times = {name: kept[key] for name, key in keys.items() if key in kept}
    if len(times) < len(keys):
        can_run = affordable(graph, device, measure.BUDGET_S)
        found = _profiled(captured, torch.device(device.device_type)) if can_run else None
        if found is None or not keys.keys() <= found.keys():
            return None
        times = {name: found[name] for name in keys}
        keep_times(environment(device), {key: times[name] for name, key in keys.items()})
    ops = (replace(op, cost=replace(op.cost, fwd_ns=times[op.name][0], bwd_ns=times[op.name][1])) for op in graph.ops)
    return replace(graph, ops=tuple(ops)), (f"costs: measured in the running program, {len(times)} ops",)


def affordable(graph: Graph, device: Device, budget_s: float) -> bool:
    """Return whether a program is small and fast enough to be run in this process (`profile_costs`)."""
    held_bytes = sum(p.size_bytes for p in graph.params) * 2 + sum(op.cost.saved_bytes for op in graph.ops)
    expected_s = sum(op.cost.total_ns for op in graph.ops) * 1e-9
    return held_bytes * _MEMORY_SHARE <= device.memory_bytes and expected_s <= budget_s / 4


def _profiled(captured: Captured, where: torch.device) -> dict[str, OpTimes] | None:
    """Return the times of each op, or None if the program does not run with made-up inputs."""
    try:
        made = made_up_inputs(captured, where)
        inputs = [made[node.name] for node in captured.module.graph.find_nodes(op="placeholder")]
        loss_at = len(captured.names.updates)  # new values of buffers come first
        return profile_code(Program(_on(captured.module, where), inputs, loss_at, where), measure.BUDGET_S)
    except Exception:  # an op may reject made-up inputs
        return None


def made_up_inputs(captured: Captured, where: torch.device) -> dict[str, torch.Tensor]:
    """Return what the program takes, by name of its node: inputs made up, and leaf tensors that share the memory of the
    model's parameters."""
    names = captured.names
    found = {}
    for node in captured.module.graph.find_nodes(op="placeholder"):
        if node.name not in names.params:
            found[node.name] = made_up(node.meta["val"], where)
            continue
        name = names.params[node.name]
        tensor = names.tensors[name]
        leaf = tensor.detach().to(where)  # the model may be on another device
        found[node.name] = leaf.requires_grad_(names.kinds[name] == "param" and tensor.requires_grad)
    return found


def profile_code(program: Program, budget_s: float) -> dict[str, OpTimes]:
    """Return the times of each call in the code of a program, which add up to the time of the whole.

    budget_s: seconds after which no other run is begun.  Raises what the code raises.
    """
    deadline = time.monotonic() + budget_s
    by_op, whole = [], []
    for run in range(_RUNS + 1):
        whole.append(program.run())
        by_op.append(program.run_timed())
        if run and time.monotonic() > deadline:
            break
    names = [node.name for node in program.module.graph.nodes if node.op in ("call_function", "call_module")]
    times = [
        {name: statistics.median(run[phase].get(name, 0) for run in by_op[1:]) for name in names} for phase in (0, 1)
    ]
    totals = [statistics.median(run[phase] for run in whole[1:]) for phase in (0, 1)]
    factors = [total / max(1.0, sum(part.values())) for total, part in zip(totals, times, strict=True)]
    forward, backward = ({name: round(times[phase][name] * factors[phase]) for name in names} for phase in (0, 1))
    return {name: (max(1, forward[name]), backward[name]) for name in names}  # every op takes time


@dataclass(frozen=True)
class Program:
    """Code that computes a loss, and what it takes.  loss_at: place of the loss among its results."""

    module: fx.GraphModule
    inputs: Sequence[torch.Tensor]
    loss_at: int
    where: torch.device

    def run(self) -> OpTimes:
        """Return the nanoseconds of the whole forward and of the whole backward."""
        forward, results = clocked(partial(self.module, *self.inputs), self.where)
        backward, _ = clocked(results[self.loss_at].backward, self.where)
        return forward, backward

    def run_timed(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the nanoseconds of each call, of its forward and of its backward."""
        timed = _TimedRun(self.module, self.where)
        try:
            results = timed.run(*self.inputs)
            results[self.loss_at].backward()
        finally:
            timed.release()
        return timed.forward, timed.backward


def _on(module: fx.GraphModule, where: torch.device) -> fx.GraphModule:
    """Return the module as it runs there: with `where` instead of the devices that were captured as constants, and with
    the kernels that stages use.  O(nodes)."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = products.kernel_of(kernel_of(node.target), node.kwargs)
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda arg: where if isinstance(arg, torch.device) else arg
        )
        node.args, node.kwargs = args, kwargs
    return fx.GraphModule(module, graph)


class _TimedRun(fx.Interpreter):
    """Runs a module op by op, with timers.  forward, backward: nanoseconds by op, the latter after backward()."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self._seen: set[Any] = set()  # nodes of autograd that are timed
        self._handles: list[Any] = []
        self._began = 0

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; the autograd nodes of an op are those that its operands do not have."""
        result = super().run_node(n)
        if n.op not in ("call_function", "call_module"):
            return result
        self.forward[n.name] = self._took
        found = [t.grad_fn for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while found:
            node = found.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            self._handles += node.register_prehook(self._begin), node.register_hook(partial(self._end, n.name))
            found += [before for before, _ in node.next_functions if before is not None]
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, timed."""
        return self._clocked(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a compiled segment, timed."""
        return self._clocked(self.fetch_attr(target), args, kwargs)

    def _clocked(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._took, result = clocked(partial(code, *args, **kwargs), self._device)
        return result

    def _begin(self, grads: Any) -> None:
        wait_for(self._device)
        self._began = time.perf_counter_ns()

    def _end(self, name: str, gave: Any, got: Any) -> None:
        wait_for(self._device)
        self.backward[name] = self.backward.get(name, 0) + time.perf_counter_ns() - self._began

    def release(self) -> None:
        """Remove the hooks; those of parameters would outlive the program."""
        for handle in self._handles:
            handle.remove()
        self._seen.clear()
