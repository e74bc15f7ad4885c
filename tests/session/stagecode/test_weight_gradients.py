"""Weights whose gradients are added in place: the same gradients as autograd's, for every way to use a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.oracles.stages_in_process import inputs_of, plan_for, replay
from torch import fx, nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.runtime.stages import adding_products, stage_module
from autopart.runtime.stages.recomputation import RecomputedGroup
from autopart.runtime.stages.weight_gradients import WeightGradient, product
from autopart.stagecode import split

WIDTH, ROWS, MICROS = 6, 3, 3


class Used(nn.Module):
    """A model that uses a square weight in one way between two layers.  shape: of a row of the batch."""

    def __init__(self, way: Callable[[Used, torch.Tensor], torch.Tensor], shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.added = nn.Parameter(torch.randn(WIDTH))
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2, bias=False)
        self.way, self.shape = way, shape
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.way(self, torch.tanh(self.first(x))))).square().sum()

    def batches(self) -> list[torch.Tensor]:
        """Return one batch for each micro-batch."""
        source = torch.Generator().manual_seed(1)
        sizes = ROWS, *self.shape, WIDTH
        return [torch.randn(*sizes, generator=source, dtype=torch.float64) for _ in range(MICROS)]


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, WIDTH)


PLACES = torch.arange(4)
WAYS: dict[str, tuple[Callable[[Used, torch.Tensor], torch.Tensor], int]] = {  # and the uses that are put in place
    "linear": (lambda m, x: F.linear(x, m.weight), 1),
    "linear with bias": (lambda m, x: F.linear(x, m.weight, m.added), 1),
    "matmul": (lambda m, x: x @ m.weight, 1),
    "matmul transposed": (lambda m, x: x @ m.weight.T, 1),
    "linear transposed": (lambda m, x: F.linear(x, m.weight.transpose(0, 1), m.added), 1),
    "mm": (lambda m, x: torch.mm(rows(x), m.weight), 1),
    "mm transposed": (lambda m, x: torch.mm(rows(x), m.weight.t()), 1),
    "addmm": (lambda m, x: torch.addmm(m.added, rows(x), m.weight), 1),
    "addmm of a matrix": (lambda m, x: torch.addmm(rows(x), rows(x), m.weight), 1),
    "addmm with factors": (lambda m, x: torch.addmm(m.added, rows(x), m.weight, beta=0.5, alpha=2), 0),
    "not contiguous": (lambda m, x: F.linear(x.transpose(0, 1), m.weight, m.added), 1),
    "expanded gradient": (lambda m, x: F.linear(x, m.weight).sum(0, keepdim=True).expand(3, -1, WIDTH), 1),
    "one vector": (lambda m, x: x[0, 0] @ m.weight, 1),
    "twice": (lambda m, x: F.linear(F.linear(x, m.weight), m.weight), 2),
    "both ways": (lambda m, x: F.linear(x, m.weight) @ m.weight, 2),
    "of itself": (lambda m, x: x @ (m.weight @ m.weight), 1),
    "elementwise": (lambda m, x: F.linear(x, m.weight) * m.weight.sum(0), 1),
    "from the left": (lambda m, x: (m.weight @ rows(x).T).T, 0),
    "scaled": (lambda m, x: F.linear(x, m.weight * 2), 0),
    "tied table": (lambda m, x: F.linear(x + m.table(PLACES[: x.shape[1]]), m.table.weight), 1),
}


def targets(module: fx.GraphModule) -> list[Any]:
    """Return what the code calls, recomputed groups included."""
    found = [node.target for node in module.graph.nodes if node.op == "call_function"]
    groups = [each.body for each in module.modules() if isinstance(each, RecomputedGroup)]
    return found + [target for body in groups for target in targets(body)]


def check(model: Used, ops: list[list[str]], captured: Captured, **options: Any) -> None:
    """Compare a step over all micro-batches, in these stages, with autograd."""
    plan = plan_for(captured.graph, ops, MICROS, **options)
    found = replay(captured, plan, [inputs_of(captured, batch) for batch in model.batches()])
    model.zero_grad()
    for batch in model.batches():
        model(batch).backward()
    for name, parameter in model.named_parameters():
        made = found.gradients.get(name)
        assert (made is None) == (parameter.grad is None), name
        if made is not None and parameter.grad is not None:
            assert torch.allclose(made, parameter.grad, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize(
    ("way", "recomputed"), sampled([(way, recomputed) for recomputed in (False, True) for way in WAYS])
)
def test_gradients_are_those_of_autograd(way: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used, expected = WAYS[way]
    model, codes = Used(used), []
    made = split.accumulate_in_place
    monkeypatch.setattr(split, "accumulate_in_place", lambda *a, **kw: codes.append(made(*a, **kw)) or codes[-1])
    captured = capture(model, flatten(model.batches()[0]))
    names = [op.name for op in captured.graph.ops]
    check(model, [names], captured, recompute={0: [set(names)]} if recomputed else {})
    (code,) = codes
    assert targets(code.module).count(product) == expected + 2  # and both layers


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("way", ["linear", "linear with bias", "matmul"])
def test_the_batch_may_have_any_number_of_axes(way: str, shape: tuple[int, ...]) -> None:
    model = Used(WAYS[way][0], shape)
    captured = capture(model, flatten(model.batches()[0]))
    check(model, [[op.name for op in captured.graph.ops]], captured)


@pytest.mark.parametrize("frozen", ["weight", "first.weight", "first", "weight added"])
def test_a_frozen_parameter_gets_no_gradient(frozen: str) -> None:
    model = Used(WAYS["linear with bias"][0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen.split()))
    captured = capture(model, flatten(model.batches()[0]))
    check(model, [[op.name for op in captured.graph.ops]], captured)


@pytest.mark.parametrize("way", ["twice", "tied table"])
def test_stages_share_a_weight(way: str) -> None:
    model = Used(WAYS[way][0])
    captured = capture(model, flatten(model.batches()[0]))
    names = [op.name for op in captured.graph.ops]
    cuts = [place for place, name in enumerate(names) if name.startswith("linear")]
    for place in cuts[1:]:
        check(model, [names[:place], names[place:]], captured)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flag_changed_between_steps_counts(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    options = {"loss_fn": F.mse_loss, "micro_batches": 2, "costs": "analytic", "precision": precision}
    with autopart.compile(model, "cpu:1", sample=batch, **options) as pipe:
        pipe.step(batch)
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        model[2].weight.requires_grad_(False)
        model.zero_grad()
        pipe.step(batch)
        assert model[2].weight.grad is None and torch.equal(model[0].weight.grad, first["0.weight"])
        model[2].weight.requires_grad_(True)
        pipe.step(batch)
        assert torch.equal(model[2].weight.grad, first["2.weight"])
        assert torch.equal(model[0].weight.grad, 2 * first["0.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_cast_is_added_in_the_parameters_precision(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(5, 7))
    copy = weight.detach().to(dtype)
    inputs = [torch.randn(3, 7).to(dtype) for _ in range(4)]
    for x in inputs:
        used = stage_module._UseCast.apply(weight, (copy,))
        product(x, used, None, True).sum().backward()
    expected = sum(torch.ones(5, 3, dtype=dtype).mm(x).float() for x in inputs)
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, expected)


def test_the_hook_of_a_weight_runs_once_when_all_its_uses_have_added_their_part() -> None:
    weight, seen = nn.Parameter(torch.randn(3, 3)), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(2, 3)
    (product(product(x, weight, None, True), weight, None, False).sum() + weight.sum()).backward()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


def test_a_product_may_be_added_later() -> None:
    weight, grad, x = nn.Parameter(torch.zeros(3, 2)), torch.randn(5, 3), torch.randn(5, 2)
    later = [WeightGradient(weight, grad, x), WeightGradient(weight, grad, x)]
    for each in later:
        each.add()
    assert torch.allclose(weight.grad, 2 * grad.T @ x)


def test_a_sparse_gradient_and_that_of_a_product_add_up() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = torch.sparse_coo_tensor([[1]], [[1.0, 2.0]], (3, 2), check_invariants=True)
    WeightGradient(weight, torch.ones(1, 3), torch.ones(1, 2)).add()
    assert weight.grad.tolist() == [[1, 1], [2, 3], [1, 1]]


def test_small_weights_and_other_layouts_stay_with_autograd() -> None:
    assert adding_products.is_weight(nn.Parameter(torch.zeros(4, 4)), 16)
    others = torch.zeros(4, 3), torch.zeros(4, 5).T, torch.zeros(2, 4, 4), torch.zeros(4, 4, dtype=torch.complex64)
    assert not any(adding_products.is_weight(nn.Parameter(each), 16) for each in others)
    assert not adding_products.is_weight(torch.zeros(4, 4), 16)
