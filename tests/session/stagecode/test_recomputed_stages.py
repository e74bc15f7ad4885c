"""Recomputed groups of a stage: the same gradients and random numbers from less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.oracles.stages_in_process import Replayed, inputs_of, plan_for, replay
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.graph import Cost, Graph, Op
from autopart.passes.simulation.graph_index import GraphIndex, redone_ns
from autopart.runtime.stages import products, weight_gradients
from autopart.runtime.stages.recomputation import RecomputedGroup
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


def chain(*steps: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> RecomputedGroup:
    """Return a group that reads a value and a weight, each step a function of the last result and the weight."""
    code = fx.Graph()
    value, weight = code.placeholder("x"), code.placeholder("weight")
    for step in steps:
        value = code.call_function(step, (value, weight))
    code.output(value)
    return RecomputedGroup(fx.GraphModule(nn.Module(), code))


def squared(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * x


def adding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight_gradients.product(x, weight, None, True)


def by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return products._Multiplied.apply(x, weight.t(), None)


def read_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _ReadsTwice.apply(x)


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * (ctx.saved_tensors[0] * 0 + ctx.saved_tensors[0] * 0 + 1)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("product", [adding, by_onednn])
@pytest.mark.parametrize(("behind", "again"), [((), 1), ((squared,), 2)])
def test_a_product_written_in_python_runs_again_only_for_ops_behind_it(
    monkeypatch: pytest.MonkeyPatch, product: Any, behind: tuple[Any, ...], again: int
) -> None:
    """The first of two products always runs again, since the square behind it saves its result."""
    ran: list[None] = []

    def multiply(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ran.append(None)
        return F.linear(left, right.t(), bias)

    for module in (weight_gradients, products):
        monkeypatch.setattr(module, "multiply", multiply)
    group = chain(product, squared, product, *behind)
    counts, gradients = [], []
    for code in (group.body, group):
        x, weight = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH)
        result = code(x.sigmoid(), weight).sum()
        ran.clear()
        result.backward()
        counts.append(len(ran))
        gradients.append((x.grad, weight.grad))
    assert counts[1] - counts[0] == again
    assert all(map(torch.equal, *gradients))


def test_a_group_keeps_its_inputs_alone_and_frees_them_in_the_backward() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = x.sin()
        made.append(weakref.ref(result))
        return result

    x = leaf(ROWS, WIDTH)
    given = x.sigmoid()
    seen = weakref.ref(given)
    result = chain(squared, noted, squared, squared)(given, x)
    del given
    assert made[0]() is None and seen() is not None
    result.sum().backward()
    assert [each() for each in made] == [None, None] and seen() is None


def test_an_input_that_was_written_to_since_is_refused() -> None:
    x, other = leaf(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    result = chain(torch.mul, squared)(x, other)
    other.add_(1)
    with pytest.raises(RuntimeError, match="changed in place before its backward"):
        result.sum().backward()


def test_a_group_that_saves_fewer_tensors_again_is_refused() -> None:
    calls: list[int] = []

    def unlike(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin() * x if len(calls) == 1 else x + x

    with pytest.raises(RuntimeError, match="saved 5 tensors, and 2 when it ran again"):
        chain(unlike, squared)(leaf(ROWS, WIDTH), torch.ones(1)).sum().backward()


def test_a_tensor_that_a_backward_reads_twice_is_refused() -> None:
    with pytest.raises(RuntimeError, match="reads a tensor of a recomputed group twice"):
        chain(squared, read_twice)(leaf(ROWS, WIDTH), torch.ones(1)).sum().backward()
