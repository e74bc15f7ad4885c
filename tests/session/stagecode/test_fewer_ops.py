"""Stages run equal ops of inputs once, and count calls in one op, with the same results as the model."""

from __future__ import annotations

from collections import Counter

import torch
from support.oracles.stages_in_process import plan_for
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.passes.program.routing import edges
from autopart.stagecode.split import stage_module

WIDTH = 6


class Layer(nn.Module):
    """A layer that builds its own mask, noise and count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -1.0)
        scaled = self.weight.exp() + self.weight.exp()  # equal, but with gradients
        return self.norm(F.dropout(x + mask, 0.5) @ scaled)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, hidden)
        return x.square().mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, generator=source)
    return x, x > 1


def ops_of(captured: Captured, *, eager: bool) -> Counter[str]:
    (stage,) = plan_for(captured.graph, [[op.name for op in captured.graph.ops]]).stages
    code = stage_module(captured, (), 0, stage, torch.device("cpu"), eager=eager)
    return Counter(str(node.target).split(".")[-2] for node in code.module.graph.nodes if "aten" in str(node.target))


def test_masks_of_layers_are_built_once_and_what_differs_or_has_gradients_stays() -> None:
    captured = capture(Model(), flatten(batch()))
    before, after = ops_of(captured, eager=False), ops_of(captured, eager=True)
    assert before - after == Counter({"zeros_like": 2, "masked_fill": 2, "add": 3})  # three counters in one op
    assert after - before == Counter({"_foreach_add": 1})
    assert after["exp"] == 6


def test_merged_ops_train_like_the_model() -> None:
    model = Model()
    for layer in model.layers:
        layer.norm.num_batches_tracked.fill_(3)
    found = autopart.verify(model, "cpu:1", sample=batch(), micro_batches=2, costs="analytic", optimizer="sgd")
    assert found.ok and len(found.buffers) == 9, found.table()


def test_only_buffers_that_leave_the_stage_at_once_are_merged() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("others", torch.zeros((), dtype=torch.int64))
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.others += 1
            return (x * self.weight).sum() * self.calls

    captured = capture(Read(), flatten((batch()[0],)))
    assert not ops_of(captured, eager=True)["_foreach_add"]


def test_sums_that_go_to_another_stage_are_not_merged() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.first + 1, self.second + 1
            return (x * first).sum() + (x * second).sum()

    captured = capture(Shifted(), flatten((batch()[0],)))
    names = [op.name for op in captured.graph.ops]
    plan = plan_for(captured.graph, [names[:2], names[2:]])
    links = edges(plan.decision, captured.graph)
    code = stage_module(captured, links, 0, plan.stages[0], torch.device("cpu"))
    assert code.outputs == tuple(names[:2])
    assert [node.name for node in code.module.graph.nodes if node.op == "call_function"] == names[:2]
