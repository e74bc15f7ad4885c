"""Costs of ops measured alone: each distinct op is run once on the device at hand, and its times are kept on disk.

Two ops are equal if target, arguments, shapes, strides, dtypes and needs for gradients are equal, so equal layers are
measured once.  Operands are made up from their shapes: no weights are needed.

Assumptions, and where they are wrong: an op takes as long alone as among others (here caches are warmer, memory is less
fragmented, and on a GPU nothing overlaps); its time does not depend on the data (lookups hit row 0; experts of a
mixture get all tokens or none); the number of threads is that of this process.  Views and creation of constants are not
measured.  Saved bytes and FLOPs are computed, not measured, and so is what adds gradients to earlier ones
(`passes.ops.analytic_costs`).
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopart.capture import Captured
from autopart.capture.trace.grouped_products import kernel_of
from autopart.files.caches import OpTimes, keep_times, read_times
from autopart.ir.cluster import Device
from autopart.ir.graph import Cost, Graph, Op, Param, Value
from autopart.passes.ops.analytic_costs import added_ns, analytic_costs
from autopart.passes.ops.table import row_of
from autopart.runtime.stages import products

BUDGET_S = 3.0
"""Seconds to spend."""
_REPEATS = 7
"""Most timed runs of an op, after two to warm up; the median counts."""
_OP_SECONDS = 0.15
"""Longest time for the runs of an op."""
_STANDS_OUT, _NOTICED_NS, _MOST_AGAIN = 8, 1_000_000, 4
"""An op is measured again if it took 8 times as long as others of their analytic time, and over 1 ms; at most 4 are."""
_MEMORY_SHARE = 4
"""An op is not measured if its operands need more than 1/4 of the device's memory."""


def measure_costs(captured: Captured, device: Device) -> tuple[Graph, tuple[str, ...]]:
    """Return the captured graph with measured costs, and notes on their source.

    Ops with the largest analytic costs come first; what is left after `BUDGET_S` gets its analytic cost, scaled by the
    mean error of the analytic costs of the measured ops.
    """
    graph = analytic_costs(captured.graph, device)
    kept = read_times(environment(device))
    samples = _samples(captured, graph, torch.device(device.device_type))
    found: dict[str, OpTimes] = {}
    deadline = time.monotonic() + BUDGET_S
    counts = {"measured": 0, "known": 0, "failed": 0, "late": 0}
    for sample in sorted(samples, key=lambda s: -s.analytic_ns):
        known = kept.get(sample.key)
        if known is None and time.monotonic() > deadline:
            counts["late"] += 1
            continue
        entry = known or _measured(sample, device)
        if entry is None:
            counts["failed"] += 1
            continue
        counts["known" if known else "measured"] += 1
        found[sample.key] = entry
    found |= _again(samples, {key: times for key, times in found.items() if key not in kept}, device)
    keep_times(environment(device), {key: times for key, times in found.items() if key not in kept})
    keys = {name: sample.key for sample in samples for name in sample.ops}
    notes = [f"costs: {counts['measured']} distinct ops measured, {counts['known']} known from earlier runs"]
    if counts["failed"]:
        notes.append(f"costs: {counts['failed']} distinct ops cannot be measured alone; their costs were estimated")
    if counts["late"]:
        notes.append(
            f"costs: no time to measure {counts['late']} distinct ops; their costs were estimated and rescaled"
        )
    return _with_costs(graph, keys, found, added_ns(graph, device)), tuple(notes)


def _again(samples: Sequence[_Sample], fresh: Mapping[str, OpTimes], device: Device) -> dict[str, OpTimes]:
    """Measure what stands out once more: ops that took far longer than the others did of their analytic time.  Returns
    the shorter times."""
    errors = {s.key: sum(fresh[s.key]) * len(s.ops) / max(1, s.analytic_ns) for s in samples if s.key in fresh}
    usual = statistics.median(errors.values()) if errors else 0.0
    out = [s for s in samples if errors.get(s.key, 0.0) > _STANDS_OUT * usual and sum(fresh[s.key]) > _NOTICED_NS]
    again = {sample.key: _measured(sample, device) for sample in out[:_MOST_AGAIN]}
    return {key: min(times, fresh[key], key=sum) for key, times in again.items() if times is not None}


def _with_costs(graph: Graph, keys: Mapping[str, str], found: Mapping[str, OpTimes], added: Mapping[str, int]) -> Graph:
    """Return the graph with measured times, or analytic ones scaled by the mean error of those that were measured.

    added: nanoseconds of each backward that were not measured, since nothing was added to a gradient.
    """
    pairs = [(op.cost, found[keys[op.name]]) for op in graph.ops if keys.get(op.name) in found]
    forward = _ratio(sum(measured[0] for _, measured in pairs), sum(analytic.fwd_ns for analytic, _ in pairs))
    backward = _ratio(sum(measured[1] for _, measured in pairs), sum(analytic.bwd_ns for analytic, _ in pairs))

    def cost(op: Op) -> Cost:
        times = found.get(keys.get(op.name, ""))
        if times is not None:
            return replace(op.cost, fwd_ns=times[0], bwd_ns=times[1] + (added[op.name] if times[1] else 0))
        if op.name not in keys:
            return op.cost  # views and constants
        return replace(op.cost, fwd_ns=int(op.cost.fwd_ns * forward), bwd_ns=int(op.cost.bwd_ns * backward))

    return replace(graph, ops=tuple(replace(op, cost=cost(op)) for op in graph.ops))


def _ratio(measured_ns: int, analytic_ns: int) -> float:
    return measured_ns / analytic_ns if measured_ns and analytic_ns else 1.0


def _shaped(example: torch.Tensor, *, grad: bool) -> torch.Tensor:
    """Return a tensor on the meta device with shape, strides and dtype of another one, and a storage of its own."""
    plain = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")
    return plain.requires_grad_(grad)


def made_up(example: torch.Tensor, device: torch.device, *, grad: bool = False) -> torch.Tensor:
    """Return a tensor like `example` with other values: floats from 0.5 to 1.5 (safe for log and division), integers 0
    (valid indices), bools True."""
    elements = _shaped(example, grad=False).untyped_storage().nbytes() // example.itemsize
    flat = torch.empty(elements, dtype=example.dtype, device=device)
    if example.is_floating_point() or example.is_complex():
        flat.uniform_(0.5, 1.5, generator=torch.Generator(device).manual_seed(0))
    else:
        flat.fill_(example.dtype == torch.bool)
    return flat.as_strided(example.shape, example.stride()).detach().requires_grad_(grad)


@dataclass(frozen=True)
class _Sample:
    """One distinct op: how to call it, the ops of the graph that equal it, and the analytic time of all of them."""

    key: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    ops: tuple[str, ...]
    analytic_ns: int


def _samples(captured: Captured, graph: Graph, device: torch.device) -> list[_Sample]:
    nodes = {node.name: node for node in captured.module.graph.nodes}
    values, params = graph.value_map(), graph.param_map()
    samples: dict[str, _Sample] = {}
    for op in graph.ops:
        if row_of(op.target).free:
            continue
        node = nodes[op.name]
        args, kwargs = _described(node, captured, values, params, device)
        grad = any(values[w].grad for w in op.writes)
        text = json.dumps([op.target, op.random, grad, _text(args), _text(kwargs)])
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        before = samples.get(key)
        weight = op.cost.total_ns + (before.analytic_ns if before else 0)
        target: Any = products.kernel_of(kernel_of(node.target), node.kwargs)
        samples[key] = _Sample(key, target, args, kwargs, grad, (*(before.ops if before else ()), op.name), weight)
    return list(samples.values())


def _described(
    node: fx.Node, captured: Captured, values: Mapping[str, Value], params: Mapping[str, Param], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an op, each tensor on the meta device and each device replaced by the measured one."""

    def describe(source: fx.Node) -> Any:
        example = source.meta["val"]
        names = captured.names
        param = names.params.get(source.name)
        grad = params[param].trainable if param is not None else values[names.value(source)].grad
        return _shaped(example, grad=grad)

    mapped = fx.map_arg((node.args, node.kwargs), describe)
    args, kwargs = pytree.tree_map(lambda x: device if isinstance(x, torch.device) else x, mapped)
    return args, kwargs


def _text(value: Any) -> str:
    """Return a text that is equal for equal arguments, without the number that distinguishes random ops."""
    if isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], torch._ops.OpOverload):
        value = (value[0], *value[2:])

    def text(part: Any) -> str:
        if not isinstance(part, torch.Tensor):
            return str(part)
        return f"{part.dtype}{list(part.shape)}/{list(part.stride())}{'g' if part.requires_grad else ''}"

    return str(pytree.tree_map(text, value))


def _measured(sample: _Sample, device: Device) -> OpTimes | None:
    """Return the times of one op, or None if it cannot run alone."""
    described = [x for x in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    if sum(t.untyped_storage().nbytes() for t in described) > device.memory_bytes // _MEMORY_SHARE:
        return None
    where = torch.device(device.device_type)
    try:
        args, kwargs = pytree.tree_map(
            lambda x: made_up(x, where, grad=x.requires_grad) if isinstance(x, torch.Tensor) else x,
            (sample.args, sample.kwargs),
        )
        with torch.set_grad_enabled(sample.grad):
            forward = _median_ns(lambda: sample.target(*args, **kwargs), where)
            backward = _backward_ns(sample.target(*args, **kwargs), (args, kwargs), where) if sample.grad else 0
    except Exception:  # an op may reject made-up operands
        return None
    return max(1, forward), backward


def _backward_ns(result: Any, operands: Any, device: torch.device) -> int:
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    inputs = [t for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not inputs:
        return 0
    given = [torch.ones_like(t) for t in outputs]
    return _median_ns(lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True), device)


def _median_ns(call: Callable[[], Any], device: torch.device) -> int:
    """Return the median nanoseconds of several runs, each until the device is done; of a long call the less of two."""
    first, _ = clocked(call, device)  # does not count: on a GPU the first call of a kernel loads it
    if first > _OP_SECONDS * 1e9:
        return min(first, clocked(call, device)[0])
    times: list[int] = []
    deadline = time.monotonic() + _OP_SECONDS
    for run in range(_REPEATS + 2):
        taken, _ = clocked(call, device)
        if run >= 2 or time.monotonic() > deadline:
            times.append(taken)
        if times and time.monotonic() > deadline:
            break
    return sorted(times)[len(times) // 2]


def clocked(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Call a function; return the nanoseconds until the device is done, and the result."""
    wait_for(device)
    start = time.perf_counter_ns()
    result = call()
    wait_for(device)
    return time.perf_counter_ns() - start, result


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what was submitted to it."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def environment(device: Device) -> str:
    """Describe what measured times depend on besides the op: torch, the processor, the number of threads."""
    if device.device_type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{platform.machine()} {platform.processor() or platform.node()} {torch.get_num_threads()} threads"
        name += ", products by oneDNN" * products.are_faster()
    return f"torch {torch.__version__}, {name}, code of stages"
