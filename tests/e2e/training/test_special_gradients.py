"""Training with complex, infinite or partly sparse gradients on replicas."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.ir.errors import NonFiniteError

OPTIONS: dict[str, Any] = {"replicas": 2, "stages": 1, "micro_batches": 2, "costs": "analytic", "cache": False}


class Complex(nn.Module):
    """A model with a complex parameter and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = x * self.turn
        return F.mse_loss(self.out(turned.real + 2 * turned.imag), y)


class Tied(nn.Module):
    """A model whose embedding has sparse gradients and shares its weight with the head, which has dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, sparse=True)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.words(x)), y)


class Large(nn.Module):
    """A model in half precision with gradients of 45,000, which do not overflow, and of twice that, which do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, dtype=torch.float16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight.float() - y) * 30_000).mean()


def batch(rows: int = 8, value: float | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator) if value is None else torch.full((rows, 4), value)
    return {"x": x, "y": torch.randn(rows, 1, generator=generator)}


def differences(kind: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of the gradients and of their norm against one process."""
    torch.manual_seed(0)
    model, given = {"complex": Complex, "tied": Tied}[kind](), batch()
    if kind == "tied":
        given = {"x": torch.arange(8), "y": torch.arange(8)}
    alone = copy.deepcopy(model)
    alone(**given).backward()
    with autopart.compile(model, "cpu:2", sample=given, **OPTIONS, **options) as pipe:
        pipe.step(given)
        found = pipe.gradients()
        norm = pipe.clip_grad_norm_(1e9)
    wanted = {name: parameter.grad.to_dense() for name, parameter in alone.named_parameters()}
    errors = {name: ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted}
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in wanted.values()]))
    return errors | {"norm": abs(norm.item() / expected.item() - 1)}


def overflowing(values: tuple[float, ...]) -> list[bool]:
    """Take accumulating steps and return whether each one was refused."""
    refused = []
    with autopart.compile(Large(), "cpu:2", sample=batch(), non_finite="raise", **OPTIONS) as pipe:
        for value in values:
            try:
                pipe.step(batch(value=value))
                refused.append(False)
            except NonFiniteError:
                refused.append(True)
            assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in pipe.parameters())
    return refused


def held_between_steps() -> tuple[bool, bool]:
    """Return whether gradients have separate version counters and keep their storage while steps accumulate."""
    given = batch()
    with autopart.compile(Complex(), "cpu:2", sample=given, **OPTIONS) as pipe:
        pipe.step(given)
        versions = [parameter.grad._version for parameter in pipe.parameters()]
        next(iter(pipe.parameters())).grad.zero_()
        alone = [parameter.grad._version for parameter in pipe.parameters()][1:] == versions[1:]
        stores = {parameter.grad.untyped_storage().data_ptr() for parameter in pipe.parameters()}
        pipe.step(given)
        return alone, {p.grad.untyped_storage().data_ptr() for p in pipe.parameters()} == stores


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("complex", {}, 1e-5),
        ("complex", {"zero": 1}, 1e-5),
        ("tied", {}, 1e-5),
    ],
)
def test_gradients_and_their_norm_equal_one_process(pair, kind, options, tolerance):
    for name, error in pair.run(differences, kind, options)[0].items():
        assert error <= tolerance, name


def test_overflow_in_rounding_or_in_a_sum_is_refused(pair):
    """In half precision an input of 1.5 makes gradients of 45,000 and an input of 4 gradients of 120,000."""
    assert pair.run(overflowing, (1.5, 4.0, 1.5))[0] == [False, True, True]


def test_gradients_share_no_version_counter_and_keep_their_storage_while_steps_accumulate(pair):
    assert pair.run(held_between_steps)[0] == (True, True)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_with_a_nan_norm_makes_all_gradients_nan(norm_type):
    with autopart.compile(Complex(), "cpu:1", sample=batch(), costs="analytic", cache=False) as pipe:
        pipe.step(batch())
        parameters = list(pipe.parameters())
        parameters[-1].grad.fill_(math.nan)
        norm = pipe.clip_grad_norm_(1e-3, norm_type=norm_type)
        assert norm.isnan() and all(torch.isnan(parameter.grad).all() for parameter in parameters)


def test_an_invalid_state_is_refused():
    with autopart.compile(Complex(), "cpu:1", sample=batch(), costs="analytic", cache=False) as pipe:
        state = pipe.state_dict()
        for wrong in (3, {**state, "out.bias": torch.ones(1, dtype=torch.complex64)}, {}):
            with pytest.raises(autopart.UsageError) as caught:
                pipe.load_state_dict(wrong)
            assert caught.value.fix
