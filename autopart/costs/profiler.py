"""Costs of ops inside the step: the captured program is run as it is, and each op timed where it stands.

An op that is measured alone finds its operands in the cache and memory that was just given back.  Here one micro-batch
goes forward op by op and backward node by node of autograd, gradients accumulating as in a step.  Then the same program
runs without timers, and all times are scaled by one factor for the forward and one for the backward, so that they add
up to its time: what the engine and the allocator do between ops is spread over them.

Wrong where the inputs matter: integers are 0, floats around 1.  A program that is too large or too slow for this
process, or that does not run on such inputs, is left to `measure`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.capture import Captured
from autopart.costs.measure import environment, made_up
from autopart.files.cost_cache import CostCache, OpTimes, default_cost_path
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph
from autopart.passes.ops.analytic_costs import analytic_costs

_RUNS = 5
"""Runs with timers and without at most, each after one for warming up; medians count."""
_MEMORY_SHARE = 3
"""A program that needs more than a third of the device's memory is not run whole."""


def profile_costs(
    captured: Captured, device: Device, *, cache_path: Path | None = None, budget_s: float = 3.0
) -> tuple[Graph, tuple[str, ...]] | None:
    """The captured graph with measured costs, and notes on where they come from; None when it cannot be run whole.

    budget_s: seconds to spend; a program expected to take a quarter of it for one micro-batch is not run.  The model's
    parameters are read, never changed, and get no gradients.
    """
    graph = analytic_costs(captured.graph, device)
    cache = CostCache(cache_path or default_cost_path(), environment(device))
    keys = {op.name: f"{graph.shape_digest()[:16]} {i}" for i, op in enumerate(graph.ops)}
    known = {name: entry for name, key in keys.items() if (entry := cache.get(key))}
    if len(known) < len(keys):
        if not _affordable(graph, device, budget_s):
            return None
        profiled = _profiled(captured, torch.device(device.kind), budget_s)
        if profiled is None or len(profiled) < len(keys):
            return None
        known = profiled
        for name, key in keys.items():
            cache.put(key, known[name])
        cache.save()
    times = {op.name: known[op.name] for op in graph.ops}
    ops = (replace(op, cost=replace(op.cost, fwd_ns=times[op.name][0], bwd_ns=times[op.name][1])) for op in graph.ops)
    return replace(graph, ops=tuple(ops)), (f"costs: measured in the running program, {len(times)} ops",)


def _affordable(graph: Graph, device: Device, budget_s: float) -> bool:
    held_bytes = sum(p.size_bytes for p in graph.params) * 2 + sum(op.cost.saved_bytes for op in graph.ops)
    expected_s = sum(op.cost.total_ns for op in graph.ops) * 1e-9
    return held_bytes * _MEMORY_SHARE <= device.memory_bytes and expected_s <= budget_s / 4


def _profiled(captured: Captured, where: torch.device, budget_s: float) -> dict[str, OpTimes] | None:
    """Nanoseconds of forward and backward of each op, or None when the program does not run with made-up inputs."""
    deadline = time.monotonic() + budget_s
    by_op, whole = [], []
    try:
        program = _Program(captured, where)
        for turn in range(_RUNS + 1):
            whole.append(program.run())
            by_op.append(program.run_timed())
            if turn and time.monotonic() > deadline:
                break
    except Exception:  # any op may refuse made-up inputs
        return None
    names = [node.name for node in captured.module.graph.nodes if node.op == "call_function"]
    times = [
        {name: statistics.median(run[phase].get(name, 0) for run in by_op[1:]) for name in names} for phase in (0, 1)
    ]
    totals = [statistics.median(run[phase] for run in whole[1:]) for phase in (0, 1)]
    factors = [total / max(1.0, sum(part.values())) for total, part in zip(totals, times, strict=True)]
    forward, backward = ({name: round(times[phase][name] * factors[phase]) for name in names} for phase in (0, 1))
    return {name: (max(1, forward[name]), backward[name]) for name in names}  # every op takes time


class _Program:
    """The captured module on made-up inputs, with leaves of its own over the model's parameters."""

    def __init__(self, captured: Captured, where: torch.device) -> None:
        self._module, self._where = _on(captured.module, where), where
        self._loss_at = len(captured.names.updates)  # new values of buffers come first
        self._inputs: list[torch.Tensor] = []
        for node in captured.module.graph.nodes:
            if node.op == "placeholder":
                self._inputs.append(self._input(captured, node))

    def _input(self, captured: Captured, node: fx.Node) -> torch.Tensor:
        names = captured.names
        if node.name not in names.params:
            return made_up(node.meta["val"], self._where)
        name = names.params[node.name]
        tensor = names.tensors[name]
        leaf = tensor.detach().to(self._where)  # the model may stand elsewhere
        return leaf.requires_grad_(names.kinds[name] == "param" and tensor.requires_grad)

    def run(self) -> OpTimes:
        """Nanoseconds of the whole forward and of the whole backward."""
        forward, results = self._clocked(partial(self._module, *self._inputs))
        backward, _ = self._clocked(results[self._loss_at].backward)
        return forward, backward

    def run_timed(self) -> tuple[dict[str, int], dict[str, int]]:
        """Nanoseconds of each op, forward and backward."""
        timed = _TimedRun(self._module, self._where)
        try:
            results = timed.run(*self._inputs)
            results[self._loss_at].backward()
        finally:
            timed.release()
        return timed.forward, timed.backward

    def _clocked(self, call: Callable[[], Any]) -> tuple[int, Any]:
        _wait(self._where)
        start = time.perf_counter_ns()
        result = call()
        _wait(self._where)
        return time.perf_counter_ns() - start, result


def _on(module: fx.GraphModule, where: torch.device) -> fx.GraphModule:
    """The module with `where` in place of the devices that were baked in as constants.  O(nodes)."""
    if where.type == "cpu":
        return module
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda arg: where if isinstance(arg, torch.device) else arg
        )
        node.args, node.kwargs = args, kwargs
    return fx.GraphModule(module, graph)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _TimedRun(fx.Interpreter):
    """Runs a module op by op.  forward and, after a backward, backward: nanoseconds by op."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self._owner: dict[Any, str] = {}  # nodes of autograd that are timed
        self._handles: list[Any] = []
        self._began = 0

    def run_node(self, n: fx.Node) -> Any:
        """As the base class; the op's nodes of autograd are those that its operands do not already have."""
        result = super().run_node(n)
        if n.op == "call_function":
            self._adopt(n.name, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the base class, timed."""
        _wait(self._device)
        start = time.perf_counter_ns()
        result = target(*args, **kwargs)
        _wait(self._device)
        self._took = time.perf_counter_ns() - start
        return result

    def _adopt(self, name: str, result: Any) -> None:
        self.forward[name] = self._took
        found = [t.grad_fn for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while found:
            node = found.pop()
            if node in self._owner:
                continue
            self._owner[node] = name
            self._handles += node.register_prehook(self._begin), node.register_hook(partial(self._end, name))
            found += [before for before, _ in node.next_functions if before is not None]

    def _begin(self, grads: Any) -> None:
        _wait(self._device)
        self._began = time.perf_counter_ns()

    def _end(self, name: str, gave: Any, got: Any) -> None:
        _wait(self._device)
        self.backward[name] = self.backward.get(name, 0) + time.perf_counter_ns() - self._began

    def release(self) -> None:
        """Take the hooks off: those of parameters outlive the program."""
        for handle in self._handles:
            handle.remove()
        self._owner.clear()
