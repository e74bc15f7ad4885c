"""Costs of ops measured inside the step: the captured program runs as it is, with a timer around each op.

An op that is measured alone finds its operands in the cache and memory that was just freed.  Here one micro-batch runs
forward op by op and backward node by node of autograd, and gradients are added to earlier ones as stages add them.
Then the program runs without timers, and the times are scaled by one factor for the forward and one for the backward,
so that they add up to its time: the time of the engine and the allocator between ops is spread over the ops.  Equal ops
of equal layers share their samples, so that a deep model needs few runs.

A measurement that another program disturbed shows, since the same program is measured twice, with timers and without:
as long as the two disagree it is measured again, and where they never agree the plan has a note, and nothing is kept.

This is wrong if times depend on the inputs: integers are 0, floats around 1.  A program that is too large or too slow
for this process, or that does not run on such inputs, is left to `measure`.
"""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from autopart.ir.graph import Graph, Op
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.runtime.stages import adding_products
from autopart.runtime.stages.adding_products import is_weight, let_products_add

_RUNS = 5
"""Most runs with timers and without that are made to have more samples, after one to warm up."""
_SHARE = 3
"""More samples are taken in a third of the budget; the rest is for measurements that disagree."""
_AGREE = 1.25
"""Largest quotient of two measurements of one program that agree."""
_MEMORY_SHARE = 3
"""A program that needs more than a third of the device's memory is not run."""


def profile_costs(captured: Captured, device: Device) -> tuple[Graph, tuple[str, ...]] | None:
    """Return the captured graph with measured costs, and notes on their source; None if the program cannot be run.

    A program expected to take a quarter of `BUDGET_S` for one micro-batch is not run.  Times of an earlier run are
    found on disk.  The model's parameters are read, never changed, and get no gradients.
    """
    if any(tensor.is_meta for tensor in captured.tensors.values()):
        return None  # there may be no memory for the whole program
    graph, kept, doubt = analytic_costs(captured.graph, device), read_times(environment(device)), ""
    digest = graph.shape_digest()[:16]
    keys = {op.name: f"{digest} {i}" for i, op in enumerate(graph.ops)}
    times = {name: kept[key] for name, key in keys.items() if key in kept}
    if len(times) < len(keys):
        can_run = affordable(graph, device, measure.BUDGET_S)
        found = _profiled(captured, torch.device(device.device_type)) if can_run else None
        if found is None:
            return None
        # A product that takes a weight transposed needs no op that transposes it.
        times, doubt = {name: found.times.get(name, (1, 0)) for name in keys}, found.doubt
        if not doubt:
            keep_times(environment(device), {key: times[name] for name, key in keys.items()})
    ops = (replace(op, cost=replace(op.cost, fwd_ns=times[op.name][0], bwd_ns=times[op.name][1])) for op in graph.ops)
    notes = (f"costs: measured in the running program, {len(times)} ops", doubt)
    return replace(graph, ops=tuple(ops)), tuple(filter(None, notes))


def affordable(graph: Graph, device: Device, budget_s: float) -> bool:
    """Return whether a program is small and fast enough to be run in this process (`profile_costs`)."""
    held_bytes = sum(p.size_bytes for p in graph.params) * 2 + sum(op.cost.saved_bytes for op in graph.ops)
    expected_s = sum(op.cost.total_ns for op in graph.ops) * 1e-9
    return held_bytes * _MEMORY_SHARE <= device.memory_bytes and expected_s <= budget_s / 4


@dataclass(frozen=True)
class Profile:
    """The times of each call, and a note if measurements of the program disagree ("")."""

    times: dict[str, OpTimes]
    doubt: str = ""


def _profiled(captured: Captured, where: torch.device) -> Profile | None:
    """Return the times of each op, or None if the program does not run with made-up inputs."""
    try:
        made = made_up_inputs(captured, where)
        inputs = [made[node.name] for node in captured.module.graph.find_nodes(op="placeholder")]
        loss_at = len(captured.names.updates)  # new values of buffers come first
        program = Program(_as_in_stages(captured, where), inputs, loss_at, where)
        return profile_code(program, measure.BUDGET_S, _alike(captured.graph))
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


def _alike(graph: Graph) -> dict[str, Hashable]:
    """Return by op what is equal for equal ops at one place of equal layers.  O(reads)."""
    values, params = graph.value_map(), graph.param_map()

    def key(op: Op) -> Hashable:
        read = [(v.shape, v.dtype, v.grad) for v in map(values.__getitem__, op.reads)]
        held = [(p.shape, p.dtype, p.trainable) for p in map(params.__getitem__, op.params)]
        attrs = re.sub(r"'%[^']*'", "%", repr(op.attrs))
        return op.target, re.sub(r"\.\d+", ".*", op.module), op.where, attrs, repr((read, held))

    return {op.name: key(op) for op in graph.ops}


def profile_code(program: Program, budget_s: float, alike: Mapping[str, Hashable] | None = None) -> Profile:
    """Return the times of each call in the code of a program, which add up to the time of the whole.

    budget_s: seconds after which no other run is begun.  alike: equal for calls that share samples, by name.  Raises
    what the code raises.
    """
    began = time.monotonic()
    program.run()
    whole: list[OpTimes] = []
    timed: list[tuple[dict[str, int], dict[str, int]]] = []
    while True:
        timed.append(program.run_timed())
        whole.append(program.run())
        spent = time.monotonic() - began
        sums = [sum(forward.values()) + sum(backward.values()) for forward, backward in timed]
        doubt = _disagreement([sum(run) for run in whole], sums)
        enough = len(whole) >= _RUNS or spent > budget_s / _SHARE
        if (enough and not doubt) or spent > budget_s:
            break
    names = [node.name for node in program.module.graph.nodes if node.op in ("call_function", "call_module")]
    fair = [run for run, taken in zip(timed, sums, strict=True) if taken <= _AGREE * min(sums)]
    parts = [_medians(names, [run[phase] for run in fair], alike or {}) for phase in (0, 1)]
    totals = [sorted(run[phase] for run in whole)[(len(whole) - 1) // 2] for phase in (0, 1)]
    factors = [total / max(1.0, sum(part.values())) for total, part in zip(totals, parts, strict=True)]
    forward, backward = ({name: round(parts[phase][name] * factors[phase]) for name in names} for phase in (0, 1))
    return Profile({name: (max(1, forward[name]), backward[name]) for name in names}, doubt)  # every op takes time


def _medians(
    names: Sequence[str], runs: Sequence[Mapping[str, int]], alike: Mapping[str, Hashable]
) -> dict[str, float]:
    """Return the median time of each call, over all runs and all calls that are alike."""
    samples: defaultdict[Hashable, list[int]] = defaultdict(list)
    for name in names:
        samples[alike.get(name, name)].extend(run.get(name, 0) for run in runs)
    medians = {key: statistics.median(each) for key, each in samples.items()}
    return {name: medians[alike.get(name, name)] for name in names}


def _disagreement(whole: Sequence[int], timed: Sequence[int]) -> str:
    """Return a note if no two measurements of a program agree, "" if two do.  Disturbances only ever add time, so the
    least two count: of runs without timers, or one without and one with."""
    first, *others = sorted(whole)
    others += timed
    off = min((max(first, other) / max(1, min(first, other)) for other in others), default=1.0)
    if off <= _AGREE:
        return ""
    measured = sorted([*whole, *timed])
    return (
        f"costs: measurements of this program disagree, {measured[0] / 1e6:.1f} to {measured[-1] / 1e6:.1f} ms: other "
        "programs ran beside it, so its predictions may be as far off; plan again on an idle machine"
    )


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


def _as_in_stages(captured: Captured, where: torch.device) -> fx.GraphModule:
    """Return the program as stages run it there: with `where` instead of the devices that were captured as constants,
    with their kernels, and with products that add the gradients of large weights themselves.  O(nodes)."""
    graph = copy.deepcopy(captured.module.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = kernel_of(node.target)
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda arg: where if isinstance(arg, torch.device) else arg
        )
        node.args, node.kwargs = args, kwargs
    tensors, names = captured.names.tensors, captured.names.params
    weights = {
        node
        for node in graph.find_nodes(op="placeholder")
        if node.name in names and is_weight(tensors[names[node.name]], adding_products.LEAST_ELEMENTS)
    }
    module = fx.GraphModule(captured.module, graph)
    let_products_add(module, weights)
    return module


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
