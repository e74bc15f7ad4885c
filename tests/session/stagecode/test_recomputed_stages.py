"""Recomputed groups of a stage: the same gradients and random numbers from less memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.oracles.stages_in_process import Replayed, inputs_of, plan_for, replay
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.graph import Cost, Graph, Op
from autopart.passes.simulation.graph_index import GraphIndex, redone_ns
from autopart.runtime.stages.stage_module import RecomputedGroup
from autopart.stagecode.stage_graph import convex_groups

ROWS, WIDTH = 4, 16


class Dropped(nn.Module):
    """Layers with dropout, and a table that all of them read."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.table.exp()
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(x)) * scale, 0.5)
        return x.square().sum()


def batches() -> list[torch.Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def ops_of(captured: Captured, layer: int) -> set[str]:
    return {op.name for op in captured.graph.ops if op.module == f"layers.{layer}"}


def played(captured: Captured, groups: Sequence[set[str]]) -> Replayed:
    plan = plan_for(captured.graph, [[op.name for op in captured.graph.ops]], len(batches()), recompute={0: groups})
    return replay(captured, plan, [inputs_of(captured, batch) for batch in batches()])


def groups_by_layer(captured: Captured) -> list[set[str]]:
    """Each layer with all that follows it before the next one."""
    names = [op.name for op in captured.graph.ops]
    starts = [min(map(names.index, ops_of(captured, layer))) for layer in range(4)]
    return [set(names[a:b]) for a, b in zip(starts, [*starts[1:], len(names)], strict=True)]


def test_random_numbers_are_drawn_alike_when_their_ops_run_again() -> None:
    captured = capture(Dropped(), flatten(batches()[0]))
    kept, again = played(captured, ()), played(captured, groups_by_layer(captured))
    assert torch.equal(kept.loss, again.loss)
    for name, grad in kept.gradients.items():
        assert torch.equal(grad, again.gradients[name]), name


def test_what_others_wait_for_runs_outside_its_group() -> None:
    readers = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}  # a and d in one group, b between them
    assert convex_groups(readers, [{"a", "d"}]) == [{"d"}]
    assert convex_groups(readers, [{"a", "b", "c"}, {"d"}]) == [{"a", "b", "c"}, {"d"}]


def test_groups_that_wait_for_each_other_leave_out_what_makes_them() -> None:
    readers = {"a": {"b"}, "c": {"d"}, "b": set(), "d": set()}  # a -> b leads into the second group, c -> d back
    assert convex_groups(readers, [{"a", "d"}, {"b", "c"}]) == [{"a", "d"}, {"b"}]


class _Seen(TorchDispatchMode):
    """Notes which forwards run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "names", ["tanh silu neg", "silu tanh neg", "convolution silu convolution neg", "silu neg neg"]
)
def test_what_runs_again_is_what_the_planner_charges(names: str) -> None:
    """Up to the last op that autograd needs something of; one that keeps its operands alone does not run for that."""
    code, x = fx.Graph(), torch.randn(1, 1, 4, requires_grad=True)
    value = code.placeholder("x")
    for name in names.split():
        more = (value, None, [1], [0], [1], False, [0], 1) if name == "convolution" else ()
        value = code.call_function(getattr(torch.ops.aten, name).default, (value, *more))
    code.output(value)
    result = RecomputedGroup(fx.GraphModule(nn.Module(), code))(x.sigmoid())
    with _Seen() as seen:
        result.sum().backward()
    again = [name for name in seen.names if name in {*names.split()} - {"neg"}]

    costed = tuple(
        Op(f"v{i}", f"aten.{name}.default", ("x",), (f"v{i}",), cost=Cost(10**i))
        for i, name in enumerate(names.split())
    )
    charged = redone_ns([op.name for op in costed], GraphIndex(Graph(1, (), (), costed, ("x",), ())))
    assert charged == sum(10**i for i, name in enumerate(names.split()[: len(again)])), again
