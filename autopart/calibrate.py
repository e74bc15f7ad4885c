"""Costs of single ops against the whole step: one micro-batch of the captured program, run and timed as it is.

Ops measured alone find their operands in the cache and leave out what happens between ops (the autograd engine,
allocation).  So the forward and the backward of the whole program are timed, and all op costs scaled by one factor each
such that they add up.  Wrong where an op is slowed more than others; the sum, which the step depends on, is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .capture import Captured
from .ir.cluster import Device
from .ir.graph import Graph
from .measure import Cache, Entry, default_cache_path, environment, made_up

_RUNS = 7
"""Timed runs at most, after one for warming up; the median counts."""
_MEMORY_SHARE = 3
"""A program that needs more than a third of the device's memory is not run whole."""
_BOUNDS = 0.5, 4.0
"""A factor outside is no correction but a mistake somewhere, and is not used."""


def calibrated(
    captured: Captured, graph: Graph, device: Device, *, cache_path: Path | None = None, budget_s: float = 2.0
) -> tuple[Graph, tuple[str, ...]]:
    """`graph`, the captured one with costs of single ops, with costs that add up to those of the whole program; and
    what to say about it.  budget_s: seconds; a program that takes longer is left as it is, and so is one that is too
    large or cannot be run with made-up inputs.  The model's parameters are read, never changed."""
    counted = sum(op.cost.fwd_ns for op in graph.ops), sum(op.cost.bwd_ns for op in graph.ops)
    held = sum(p.size_bytes for p in graph.params) * 2 + sum(op.cost.saved_bytes for op in graph.ops)
    if held * _MEMORY_SHARE > device.memory_bytes or sum(counted) > budget_s * 1e9 / 2 or not counted[0]:
        return graph, ()
    cache = Cache(cache_path or default_cache_path(), environment(device))
    key = f"whole {graph.shape_digest()}"
    taken = cache.get(key) or _timed(captured, torch.device(device.kind), budget_s)
    if taken is None:
        return graph, ()
    cache.put(key, taken)
    cache.save()
    factors = tuple(t / c if c else 1.0 for t, c in zip(taken, counted, strict=True))
    if not all(_BOUNDS[0] <= factor <= _BOUNDS[1] for factor in factors):
        return graph, (
            f"costs: the whole program takes {factors[0]:.1f} and {factors[1]:.1f} times the sum of its ops",
        )
    scaled = tuple(
        replace(
            op,
            cost=replace(op.cost, fwd_ns=round(op.cost.fwd_ns * factors[0]), bwd_ns=round(op.cost.bwd_ns * factors[1])),
        )
        for op in graph.ops
    )
    return replace(graph, ops=scaled), ()


def _timed(captured: Captured, where: torch.device, budget_s: float) -> Entry | None:
    """Nanoseconds of forward and backward of the program, or None when it does not run with made-up inputs."""
    names = captured.names
    trainable = [t for name, t in names.tensors.items() if names.kinds[name] == "param" and t.requires_grad]
    deadline = time.monotonic() + budget_s
    times: list[Entry] = []
    try:
        inputs = [
            names.tensors[names.params[node.name]] if node.name in names.params else made_up(node.meta["val"], where)
            for node in captured.module.graph.nodes
            if node.op == "placeholder"
        ]
        for turn in range(_RUNS + 1):
            forward, loss = _clocked(partial(_loss, captured, inputs), where)
            backward, _ = _clocked(partial(torch.autograd.grad, loss, trainable, allow_unused=True), where)
            if turn:
                times.append((forward, backward))
            if times and time.monotonic() > deadline:
                break
    except Exception:  # whatever an op dislikes about made-up inputs; single costs stand then
        return None
    middle = len(times) // 2
    return sorted(t[0] for t in times)[middle], sorted(t[1] for t in times)[middle]


def _loss(captured: Captured, inputs: list[Any]) -> torch.Tensor:
    results = captured.module(*inputs)
    place = len(captured.names.updates)  # new values of buffers come first
    loss = results[place]
    assert isinstance(loss, torch.Tensor)
    return loss


def _clocked(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - start, result
