"""What a slot keeps between the backward of inputs and that of weights, against the profiler of torch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.models.tokens.decoder import Shape, decoder
from torch.profiler import ProfilerActivity, profile

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.actions import Slot
from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.ir.shares import Window
from autopart.runtime.stages.stage import StageRunner
from autopart.stagecode.split import stage_module

ROWS, SLOT = 8, Slot(0, 0)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of memory behind these tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def factors_of(graph: Graph) -> int:
    """Return the bytes of what products with weights read, each value once, and of the gradients of their results."""
    sizes = {value.name: value.size_bytes for value in graph.values}
    products = [
        op for op in graph.ops if op.target.removesuffix(".default") in {"aten.linear", "aten.addmm", "aten.mm"}
    ]
    return sum(sizes[name] for name in {op.reads[0] for op in products}) + sum(sizes[op.writes[0]] for op in products)


@pytest.mark.parametrize("recomputed", [False, True])
def test_only_the_factors_of_products_with_weights_are_kept(recomputed: bool) -> None:
    case = decoder(Shape())
    model, batch = case.model(), flatten(case.data(ROWS))
    captured = capture(model, batch)
    graph, ops = captured.graph, tuple(op.name for op in captured.graph.ops)
    stage = Stage(ops, (0,), (ops[: len(ops) // 2],) if recomputed else ())
    code = stage_module(captured, (), 0, stage, torch.device("cpu"), deferrable=True)
    (loss,) = graph.outputs[:1]
    runner = StageRunner({ROWS: (None, (code,))}, dict(captured.tensors), frozenset(), frozenset({loss}))
    values = dict(zip(graph.inputs, next(iter(batch.micro((ROWS,)))), strict=True))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runner.forward(SLOT, Window(0, ROWS, ROWS), values, (0, 0), train=True)
        runner.backward(SLOT, {loss: torch.ones(())}, whole=False)
    events = seen.profiler.kineto_results.events()
    left = sum(event.nbytes() for event in events if event.name() == "[memory]")
    later = runner._deferred[SLOT]
    assert all(each.parameter.grad is None for each in later) and len(later) == len({id(e.parameter) for e in later})
    kept = storage_bytes(factor for each in later for factor in (each.left, each.right))
    assert left == kept + storage_bytes(parameter.grad for parameter in model.parameters())
    assert kept == factors_of(graph)
    runner.backward_of_weights(SLOT)
    assert not runner._deferred and all(parameter.grad is not None for parameter in model.parameters())
