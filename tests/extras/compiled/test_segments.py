"""Segments of a stage's code: where it is cut, what a compiler may see, and which segments are equal."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extending.shards_in_process import Group, captured_at, errors
from support.models.tokens.by_hand import Gpt
from torch import fx, nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.extras.compiled import inductor
from autopart.extras.compiled.inductor import Inductor, segmented
from autopart.ir.errors import RefusedError
from autopart.passes.shards.choice import choose
from autopart.runtime.stages.compiled_segment import CompiledSegment, form_of
from autopart.runtime.stages.stage_module import StageModule
from autopart.stagecode.stage_code import specs_of
from autopart.stagecode.stage_graph import text_of

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, kept = torch.nn.functional.gelu(self.linear(self.norm(x))).split(WIDTH // 2, -1)
        return x + self.drop(torch.cat((kept.tanh(), y), -1)) * 0.5


class Stack(nn.Module):
    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def cut(captured: Captured) -> tuple[fx.GraphModule, list[fx.GraphModule]]:
    """Return the captured code with its segments run as they are, and the segments."""
    found: list[fx.GraphModule] = []
    paths = {op.name: op.module for op in captured.graph.ops}
    return segmented(captured.module, paths, lambda body: found.append(body) or body), found  # type: ignore


def test_equal_layers_give_equal_segments() -> None:
    _, segments = cut(capture(Stack(), flatten(torch.randn(4, WIDTH))))
    assert len(segments) == 4  # three layers and the head
    assert len({text_of(body) for body in segments}) == 2


def test_a_random_op_stays_between_segments() -> None:
    code, segments = cut(capture(Stack(dropout=0.5), flatten(torch.randn(4, WIDTH))))
    assert len({text_of(body) for body in segments}) <= 3
    outside = [node for node in code.graph.nodes if node.op == "call_function" and "keyed" in str(node.target)]
    assert len(outside) == 3
    assert not any("keyed" in str(node.target) for body in segments for node in body.graph.nodes)


def test_a_random_op_without_a_key_is_refused_by_name() -> None:
    captured = capture(Stack(), flatten(torch.randn(4, WIDTH)))
    planted = next(node for node in captured.module.graph.nodes if node.target is torch.ops.aten.gelu.default)
    planted.target, planted.args = torch.ops.aten.bernoulli.p, (planted.args[0], 0.5)
    with pytest.raises(RefusedError, match=r"bernoulli.*draws random numbers in compiled code"):
        cut(captured)


def test_segments_of_other_numbers_or_shapes_are_not_equal() -> None:
    def scaled(number: float) -> Callable[[Any], Any]:
        graph = fx.Graph()
        x = graph.placeholder("x")
        y = graph.call_function(torch.ops.aten.mul.Tensor, (x, number))
        graph.output((graph.call_function(torch.ops.aten.tanh.default, (y,)),))
        return fx.GraphModule(nn.Module(), graph)

    assert text_of(scaled(0.5)) == text_of(scaled(0.5)) != text_of(scaled(0.25))
    one, other = torch.zeros(2, 3), torch.zeros(3, 2).t()
    assert form_of([one]) != form_of([other])
    assert form_of([one]) != form_of([one.clone().requires_grad_()])
    with torch.no_grad():
        assert form_of([one.clone().requires_grad_()]) != form_of([one])


def test_code_that_fails_raises_what_the_ops_raise() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.linalg_inv.default, (x,), name="inverse"),))

    def broken(*_: torch.Tensor) -> Any:
        raise RuntimeError("somewhere in a kernel")

    segment = CompiledSegment(fx.GraphModule(nn.Module(), graph), lambda *_: broken)
    with pytest.raises(torch.linalg.LinAlgError):
        segment(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="somewhere in a kernel"):
        segment(torch.eye(2))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x).tanh())) * 0.5
        return x + self.drop(self.down(self.drop(inner).sin()).cos())


class WideStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Wide(), Wide()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("in_place", [False, True])
def test_segments_between_exchanges_meet_what_they_are_made_for(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    captured, inputs = captured_at(WideStack().double(), torch.randn(2, 6, WIDTH, dtype=torch.double))
    graph, found, group = captured.graph, choose(captured.graph, 2), Group(2)
    again = [[op.name for op in graph.ops if op.module.startswith("layers.1")]]
    made: Counter[int] = Counter()
    planned: dict[int, int] = {}

    def made_for(body: fx.GraphModule, inputs: Any) -> Any:
        made[threading.get_ident()] += 1
        return body

    def compiled(code: StageModule, own: Any) -> StageModule:
        code = Inductor(graph.op_map()).compile(code, own, specs_of(graph, found), (), torch.device("cpu"))
        planned[threading.get_ident()] = made[threading.get_ident()]
        return code

    monkeypatch.setattr(inductor, "_compiled", made_for)
    assert errors(captured, inputs, found, group, again=again, in_place=in_place, compiled=compiled) < 1e-10
    assert group.exchanges >= 8 and len(planned) == 2 and min(planned.values()) >= 3
    assert planned == made  # none is made for other shapes or strides when it runs


def test_code_with_exchanges_runs_compiled_on_all_ranks_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(24, (2, 8))
    captured, inputs = captured_at(Gpt().double(), (ids, ids))
    graph, found = captured.graph, choose(captured.graph, 2)

    def compiled(code: StageModule, own: Any) -> StageModule:
        return Inductor(graph.op_map()).compile(code, own, specs_of(graph, found), (), torch.device("cpu"))

    def broken(body: fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(inductor, "_compiled", broken)
    with pytest.raises(RefusedError, match=r"cannot be compiled, from aten[\s\S]*by_hand.py[\s\S]*no compiler here"):
        errors(captured, inputs, found, compiled=compiled)


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, "off"), (0.5, "all")])
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(
    dropout: float, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def compiled(body: fx.GraphModule, inputs: Any) -> Any:
        asked.append(len(body.graph.nodes))
        if any(node.target is torch.ops.aten.gelu.default for node in body.graph.nodes):
            raise RuntimeError("gelu is too hard")
        return body

    monkeypatch.setattr(inductor, "_compiled", compiled)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    for backend in ("eager", "inductor"):
        model = Stack(dropout=dropout)
        options: dict[str, Any] = {"micro_batches": 2, "costs": "analytic", "recompute": recompute, "backend": backend}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with autopart.compile(model, "cpu:1", sample=batch, **options) as pipe:
                loss = pipe.step(batch)
        found.append((loss, [p.grad for p in model.parameters()]))
        texts = [str(w.message) for w in seen if w.category is inductor.CompileWarning]
    (expected, gradients), (loss, own) = found
    assert torch.equal(loss, expected)
    for gradient, wanted in zip(own, gradients, strict=True):  # eager products add to what is there: other roundings
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)
    assert asked, "nothing was compiled"
    assert len(texts) == 1 and "gelu is too hard" in texts[0] and "test_segments.py" in texts[0], texts
