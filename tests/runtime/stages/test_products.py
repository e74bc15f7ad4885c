"""Products on the faster kernel: the same numbers as torch's to rounding, with derivatives; small ones stay."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from support.layouts import drawn_tensor
from torch.nn import functional as F

from autopart.runtime.stages import products, weight_gradients
from autopart.runtime.stages.products import multiply
from autopart.runtime.stages.weight_gradients import WeightGradient, product

ROWS, OUT, GIVEN = 96, 160, 144


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let large products take oneDNN on any processor."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "are_faster", lambda: True)
    yield


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(ROWS,), (4, ROWS // 2), (2, 3, ROWS // 4)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_large_product_is_that_of_torch(shape: tuple[int, ...], strided: bool, biased: bool) -> None:
    x = made(*shape, GIVEN)
    weight = made(OUT, GIVEN, seed=1).t() if strided else made(GIVEN, OUT, seed=1)
    bias = made(OUT, seed=2) if biased else None
    assert products.takes_onednn(x, weight, bias)
    exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
    torch.testing.assert_close(products.multiply(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)


def test_a_strided_left_side_is_multiplied_as_it_reads() -> None:
    left, right = made(ROWS, OUT).t(), made(ROWS, GIVEN, seed=1)
    exact = left.double() @ right.double()
    torch.testing.assert_close(products.multiply(left, right).double(), exact, rtol=1e-5, atol=1e-4)


def test_small_products_and_other_precisions_keep_the_bits_of_torch() -> None:
    for x, weight in ((made(2, 8), made(8, 4)), *((made(ROWS, GIVEN).to(t), made(GIVEN, OUT).to(t)) for t in
                      (torch.float64, torch.bfloat16))):  # fmt: skip
        assert not products.takes_onednn(x, weight)
        assert torch.equal(products.multiply(x, weight), x @ weight)


def test_a_bias_that_is_broadcast_and_rows_with_gaps_stay_with_torch() -> None:
    x, weight = made(ROWS, GIVEN), made(GIVEN, OUT)
    assert not products.takes_onednn(x, weight, made(1))
    assert not products.takes_onednn(x, made(GIVEN, 2 * OUT)[:, ::2])


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_trained_product_are_those_of_autograd(transposed: bool) -> None:
    x, weight, bias = made(3, ROWS, GIVEN), made(OUT, GIVEN, seed=1), made(OUT, seed=2)
    weight = weight if transposed else weight.t().contiguous()
    mine = [t.clone().requires_grad_() for t in (x, weight, bias)]
    theirs = [t.double().requires_grad_() for t in (x, weight, bias)]
    for _ in range(2):  # the second adds to the first
        product(*mine, transposed).square().sum().backward()
        F.linear(theirs[0], theirs[1] if transposed else theirs[1].t(), theirs[2]).square().sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad.double() - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()


def test_a_deferred_product_is_added_to_what_is_there() -> None:
    parameter, left, right = torch.nn.Parameter(made(OUT, GIVEN)), made(ROWS, OUT, seed=1), made(ROWS, GIVEN, seed=2)
    parameter.grad = made(OUT, GIVEN, seed=3)
    expected = parameter.grad.double() + left.double().t() @ right.double()
    WeightGradient(parameter, left, right).add()
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", ["linear", "addmm", "mm"])
def test_costs_measure_the_kernel_with_its_derivative(op: str) -> None:
    x, bias = made(ROWS, GIVEN).requires_grad_(), made(OUT, seed=2).requires_grad_()
    weight = made(OUT, GIVEN, seed=1) if op == "linear" else made(GIVEN, OUT, seed=1)
    weight.requires_grad_()
    given = {"linear": (x, weight, bias), "addmm": (bias, x, weight), "mm": (x, weight)}[op]
    target = getattr(torch.ops.aten, op).default
    assert products.kernel_of(target, {}) is not target
    results = []
    for code in (products.kernel_of(target, {}), target):
        result = code(*given)
        results.append([result, *torch.autograd.grad(result.square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_other_ops_have_no_other_kernel() -> None:
    assert products.kernel_of(torch.ops.aten.tanh.default, {}) is torch.ops.aten.tanh.default


def test_the_switch_of_torch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(products, "_is_faster_here", lambda: True)
    assert products.are_faster()
    try:
        torch.backends.mkldnn.enabled = False
        assert not products.are_faster()
    finally:
        torch.backends.mkldnn.enabled = True


@pytest.mark.parametrize("transposed", [False, True])
def test_a_frozen_weight_takes_the_kernel_that_costs_expect_and_keeps_no_rows(transposed: bool) -> None:
    x, weight, bias = made(3, ROWS, GIVEN).requires_grad_(), made(OUT, GIVEN, seed=1), made(OUT, seed=2)
    weight = weight if transposed else weight.t().contiguous()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = product(x, weight, bias, transposed)
    right = weight.t() if transposed else weight
    assert torch.equal(result, products.multiply(x.detach(), right, bias))
    assert [t.untyped_storage().data_ptr() for t in saved] == [weight.untyped_storage().data_ptr()]
    result.backward(torch.ones_like(result))
    exact = torch.ones_like(result).double() @ right.double().t()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact, rtol=1e-5, atol=1e-3)


def test_a_product_that_is_added_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "_PIECE_BYTES", 32 * GIVEN * 4)
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(weight_gradients, "multiply", lambda a, b: sizes.append((*a.shape, *b.shape)) or multiply(a, b))
    parameter, left, right = torch.nn.Parameter(made(OUT, GIVEN)), made(ROWS, OUT, seed=1), made(ROWS, GIVEN, seed=2)
    parameter.grad = made(OUT, GIVEN, seed=3)
    expected = parameter.grad.double() + left.double().t() @ right.double()
    WeightGradient(parameter, left, right).add()
    assert sizes == [(32, ROWS, ROWS, GIVEN)] * (OUT // 32)
    torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_product_with_a_factor_stays_with_torch() -> None:
    assert products.kernel_of(torch.ops.aten.addmm.default, {"beta": 0.5}) is torch.ops.aten.addmm.default


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return found.shape == exact.shape and torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_operands_in_any_layout_give_the_products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_FLOPS", 1)
    taken = 0
    for seed in range(1500):
        draw = random.Random(seed)
        lead = [draw.choice((1, 2, 3, 5)) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
        given, out = draw.choice((0, 1, 2, 7, 16, 33)), draw.choice((0, 1, 2, 7, 16, 33))
        x, weight = drawn_tensor([*lead, given], draw), drawn_tensor([given, out], draw)
        bias = drawn_tensor([out], draw) if draw.random() < 0.7 else None
        taken += products.takes_onednn(x, weight, bias)
        exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
        assert close(products.multiply(x, weight, bias), exact), seed
    assert taken > 300


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("op", ["linear", "addmm", "mm", "product", "deferred"])
def test_derivatives_of_operands_in_any_layout_are_those_of_torch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_FLOPS", 1)
    monkeypatch.setattr(weight_gradients, "_PIECE_BYTES", 40)
    for seed in range(200):
        draw = random.Random(seed)
        rows, given, out = (draw.choice((1, 2, 7, 16)) for _ in range(3))
        x, weight = drawn_tensor([rows, given], draw), drawn_tensor([given, out], draw)
        bias, back = drawn_tensor([out], draw), drawn_tensor([rows, out], draw)
        parts = (x, weight, bias)
        mine, theirs = ([(t.detach() if t is parts[1] else t).requires_grad_() for t in parts] for _ in range(2))
        first = drawn_tensor([given, out], draw)
        mine[1].grad = first.clone() if draw.random() < 0.5 else None
        before = 0 if mine[1].grad is None else mine[1].grad.double()
        weight_of = mine[1]
        later: list[WeightGradient] = []
        if op == "linear":
            made = products.kernel_of(torch.ops.aten.linear.default, {})(mine[0], weight_of.t(), mine[2])
        elif op == "addmm":
            made = products.kernel_of(torch.ops.aten.addmm.default, {})(mine[2], mine[0], weight_of)
        elif op == "mm":
            made = products.kernel_of(torch.ops.aten.mm.default, {})(mine[0], weight_of) + mine[2]
        else:
            made = product(mine[0], weight_of, mine[2], False)
        exact = theirs[0].double() @ theirs[1].double() + theirs[2].double()
        assert close(made, exact), seed
        if op == "deferred":
            with weight_gradients.deferring(later):
                made.backward(back)
            weight_gradients.add_all(later)
        else:
            made.backward(back)
        expected = torch.autograd.grad(exact, theirs, back.double())
        for number, (one, grad) in enumerate(zip(mine, expected, strict=True)):
            assert one.grad is not None and close(one.grad, grad.double() + (before if number == 1 else 0)), (seed, op)
