"""A captured program as the ranks of a shard group run it, each in a thread of this process; random assignments."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, Captured
from autopart.ir.graph import Graph, Size
from autopart.passes.shards.assignment import Assignment, check
from autopart.passes.shards.calls import Call, calls_of
from autopart.passes.shards.factors import factors_of
from autopart.passes.shards.facts import row_digits
from autopart.passes.shards.states import COPY, CUT_KIND, State
from autopart.passes.shards.strategies import NO_DIGIT, Strategy, strategies
from autopart.passes.tokens.recipe import Recipe
from autopart.rng import keyed, micro_key
from autopart.runtime.stages import shard_group
from autopart.runtime.stages.stage_module import StageModule
from autopart.runtime.stages.weight_gradients import fill
from autopart.stagecode.rewrites import accumulate_in_place
from autopart.stagecode.shards import shard_code
from autopart.stagecode.split import cut
from support.oracles.sliced import play_sliced, sliced_stages

Tensors = Mapping[str, torch.Tensor]
Result = tuple[torch.Tensor, dict[str, torch.Tensor | None]]
"""A loss, and the gradients of parameters."""
_ONE_AT_A_TIME = threading.Lock()
"""Threads share the generator of the process."""


def _keyed(*args: Any, **kwargs: Any) -> Any:
    with _ONE_AT_A_TIME:
        return keyed(*args, **kwargs)


class Group:
    """Members that are threads.  exchanges: how many the first one took part in."""

    def __init__(self, count: int) -> None:
        self.count, self.exchanges = count, 0
        self.barrier = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count

    def member(self, index: int) -> Any:
        """Return the group as one of its members sees it."""
        return _Member(self, index)


class _Member:
    def __init__(self, group: Group, index: int) -> None:
        self._group, self.index, self.count, self.beside = group, index, group.count, True

    def _all(self, tensor: torch.Tensor) -> torch.Tensor:
        fill()
        self._group.exchanges += self.index == 0
        self._group.given[self.index] = tensor.detach().clone()
        self._group.barrier.wait()
        found = torch.stack(self._group.given)
        self._group.barrier.wait()
        return found

    def summed(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        every = self._all(tensor)
        return every.amax(0) if largest else every.sum(0)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._all(tensor)

    def begin_gathering(self, tensor: torch.Tensor) -> Any:
        found = self._all(tensor)
        return lambda: found

    def scattered(self, parts: torch.Tensor) -> torch.Tensor:
        return self._all(parts)[:, self.index].sum(0)


def captured_at(model: torch.nn.Module, sample: Any, rows: int = 2) -> tuple[Captured, Tensors]:
    """Capture a training step of a model for so many rows, with all that it computes in fp32 turned to fp64, and return
    it with its inputs."""
    captures, batch = CaptureCache(model), flatten(sample)
    batch = captures.settled(batch, Size(rows), "step")
    captured = captures(batch, Size(rows))

    def wide(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):  # what was captured of a value: what slices keep has its dtype
            return argument.to(torch.float64) if argument.dtype is torch.float32 else argument
        return torch.float64 if argument is torch.float32 else argument

    for node in captured.module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, wide)
        node.kwargs = fx.node.map_aggregate(node.kwargs, wide)
        if "val" in node.meta:
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], wide)
    captured = replace(captured, graph=_wide(captured.graph))
    tensors = [leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor)]
    return captured, {name: t[:rows] for name, t in zip(captured.graph.inputs, tensors, strict=True)}


def _wide(graph: Graph) -> Graph:
    """Return a graph with fp64 in place of fp32: slices cast parameters as its ops say."""
    ops = [replace(op, attrs=tuple([(n, "float64" if a == "float32" else a) for n, a in op.attrs])) for op in graph.ops]
    values = [replace(value, dtype="float64") if value.dtype == "float32" else value for value in graph.values]
    return replace(graph, ops=tuple(ops), values=tuple(values))


def drawn(
    graph: Graph, shards: int, seed: int, allowed: Callable[[Call, Strategy], bool] = lambda call, way: True
) -> Assignment:
    """Return a random assignment: any way to run each op that its rule allows, mostly one that cuts something.

    allowed: says which of these."""
    rng, factors, rows = random.Random(seed), factors_of(graph), row_digits(graph, factors_of(graph))
    states: dict[str, State] = dict.fromkeys((*graph.inputs, *(p.name for p in graph.params)), COPY)
    chosen: dict[str, Strategy] = {}
    wanted: dict[str, set[State]] = {}
    for call in calls_of(graph):
        options = [each for each in strategies(call, factors, shards) if each.digit not in rows and allowed(call, each)]
        cutting = [each for each in options if each.digit != NO_DIGIT]
        found = chosen[call.op.name] = rng.choice(cutting if cutting and rng.random() < 0.8 else options)
        for name, state in zip(call.reads, found.reads, strict=True):
            wanted.setdefault(name, set()).add(state)
        states.update(zip(call.op.writes, found.writes, strict=True))
    for param in graph.params:
        own = wanted.get(param.name, set())
        if param.kind == "param" and len(own) == 1 and min(own).kind == CUT_KIND:
            states[param.name] = min(own)
    return check(Assignment(shards, chosen, states), graph, factors)


def part(tensor: torch.Tensor, state: State, index: int, count: int) -> torch.Tensor:
    """Return what one of `count` members holds of a tensor."""
    if state.kind != CUT_KIND:
        return tensor
    axis = state.axis
    return tensor.unflatten(axis, (state.before, count, -1)).select(axis + 1, index).flatten(axis, axis + 1)


def _copy(tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().clone()
    return torch.nn.Parameter(made, of.requires_grad) if isinstance(of, torch.nn.Parameter) else made


def _code(captured: Captured, groups: Sequence[Collection[str]]) -> StageModule:
    graph = captured.graph
    ops = [op.name for op in graph.ops]
    return cut(captured, ops, [graph.outputs[0]], torch.device("cpu"), groups=groups)


def run_whole(captured: Captured, inputs: Tensors) -> Result:
    """Return the loss and the gradients of a captured program in one piece."""
    return _run(_code(captured, ()), {name: _copy(t, t) for name, t in captured.tensors.items()}, inputs)


def _run(code: StageModule, tensors: Tensors, inputs: Tensors) -> Result:
    with micro_key(0, 0, 0):
        loss = code.module(*code.arguments(tensors), *[inputs[name] for name in code.inputs])[0]
        loss.backward()
    trained = {name: t.grad for name, t in tensors.items() if t.requires_grad}
    return loss.detach(), trained


def errors(
    captured: Captured,
    inputs: Tensors,
    assignment: Assignment,
    group: Group | None = None,
    expected: Result | None = None,
    again: Sequence[Collection[str]] = (),
    *,
    in_place: bool = False,
    compiled: Callable[[StageModule, Tensors], StageModule] = lambda code, own: code,
) -> float:
    """Return the largest relative error of the loss and of any gradient, against the same program whole.

    expected: of that (`run_whole`).  again: groups of ops that run again in the backward.  in_place: whether products
    add gradients of weights by themselves, beside exchanges.  compiled: compiles the code of a member, which holds
    these tensors."""
    graph = captured.graph

    def run(member: Any, own: Tensors) -> Result:
        code = shard_code(_code(captured, again), graph, assignment, member)
        code = accumulate_in_place(code, own, deferrable=True) if in_place else code
        return _run(compiled(code, own), own, inputs)

    group = group or Group(assignment.shards)
    return largest_error(captured, assignment, group, run, expected or run_whole(captured, inputs))


def sliced_errors(
    captured: Captured,
    inputs: Tensors,
    assignment: Assignment,
    recipe: Recipe,
    lengths: Sequence[int],
    cut_at: Sequence[int] = (),
    again: float = 0.0,
) -> float:
    """Return what `errors` does, of the program in slices of tokens.  cut_at, again: as for `sliced_stages`."""
    graph = captured.graph

    def run(member: Any, own: Tensors) -> Result:
        shard = partial(shard_code, graph=graph, assignment=assignment, members=member, recipe=recipe)
        with micro_key(0, 0, 0):
            return play_sliced(graph, sliced_stages(captured, recipe, lengths, cut_at, shard, again), own, inputs)

    return largest_error(captured, assignment, Group(assignment.shards), run, run_whole(captured, inputs))


def largest_error(
    captured: Captured,
    assignment: Assignment,
    group: Group,
    run: Callable[[Any, Tensors], Result],
    expected: Result,
) -> float:
    """Return the largest relative error of the loss and of any gradient of what each member runs with its parts."""
    count = group.count
    found: list[Any] = [None] * count
    patch = pytest.MonkeyPatch()

    def run_member(index: int) -> None:
        try:
            states = assignment.states
            own = {name: _copy(part(t, states[name], index, count), t) for name, t in captured.tensors.items()}
            found[index] = run(group.member(index), own)
        except BaseException as error:
            found[index] = error
            group.barrier.abort()

    patch.setattr(shard_group, "keyed", _keyed)
    threads = [threading.Thread(target=run_member, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    patch.undo()
    failures = [each for each in found if isinstance(each, BaseException)]
    for failure in sorted(failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise failure
    loss, gradients = expected
    scale = max((g.norm().item() for g in gradients.values() if g is not None), default=0.0) or 1.0
    worst = max(abs((own - loss) / loss).item() for own, _ in found)
    for name, gradient in gradients.items():
        whole = torch.zeros_like(captured.tensors[name]) if gradient is None else gradient
        state, own = assignment.states[name], [grads.get(name) for _, grads in found]
        parts = [part(whole, state, index, count) for index in range(count)]
        own = [torch.zeros_like(parts[n]) if g is None else g for n, g in enumerate(own)]
        pairs = zip(own, parts, strict=True) if state.kind == CUT_KIND else [(sum(own), whole)]
        size = max(whole.norm().item(), 1e-6 * scale)
        worst = max(worst, *((a - b).norm().item() / size for a, b in pairs))
    return float(worst)
