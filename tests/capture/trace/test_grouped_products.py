"""Tests of products of groups of rows: torch's kernel where it takes the operands, exact gradients everywhere."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as hf
from support.grids import sampled
from support.layouts import drawn_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopart
from autopart.capture.trace.grouped_products import _has_kernel, grouped_product, kernel_of

ENDS = [2, 2, 5, 12]


def products(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    pieces = zip([0, *ENDS], ENDS, strict=False)
    return torch.cat([rows[a:b] @ matrix for (a, b), matrix in zip(pieces, matrices, strict=True)])


class Seen(TorchDispatchMode):
    """The names of the ops dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ends", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide", "kernel"),
    [
        (torch.float32, 16, True),
        (torch.bfloat16, 16, True),
        (torch.float16, 16, True),
        (torch.float64, 16, False),  # the kernel has no double precision
        (torch.float32, 7, False),  # rows of 28 bytes
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_products_and_gradients_are_those_of_each_group(
    dtype: torch.dtype, wide: int, kernel: bool, columns: bool, ends: torch.dtype, summed: bool
) -> None:
    hf.integrations.moe  # noqa: B018  registers the op that is traced
    torch.manual_seed(1)
    rows = torch.randn(12, 8, dtype=dtype, requires_grad=True)
    held = torch.randn(4, wide, 8, dtype=dtype) if columns else torch.randn(4, 8, wide, dtype=dtype)
    held.requires_grad_()
    matrices = held.transpose(1, 2) if columns else held
    with Seen() as seen:
        found = grouped_product(rows, matrices, torch.tensor(ENDS, dtype=ends))
    assert ("aten::_grouped_mm" in seen.names) is kernel
    expected = products(rows, matrices)
    torch.testing.assert_close(found, expected)
    given = torch.ones((), dtype=dtype).expand_as(found) if summed else torch.randn_like(found)
    ours = torch.autograd.grad(found, [rows, held], given)
    theirs = torch.autograd.grad(expected, [rows, held], given)
    torch.testing.assert_close(ours, theirs)


def test_groups_in_any_layout_have_the_products_and_gradients_of_torch() -> None:
    hf.integrations.moe  # noqa: B018
    taken = 0
    for seed in range(400):
        draw = random.Random(seed)
        ends = sorted(draw.choices(range(9), k=draw.choice((1, 2, 3))))
        given, out = draw.choice((0, 1, 4, 8, 12)), draw.choice((0, 1, 4, 8, 16))
        rows, held = drawn_tensor([ends[-1], given], draw), drawn_tensor([len(ends), given, out], draw)
        back = drawn_tensor([ends[-1], out], draw)
        if seed % 20 == 0:  # one row is dense, however far the next one would be
            ends, rows, held = [1], torch.randn(1, 12), torch.randn(1, 12, 4)
            back = torch.randn(1, 9)[:, 2:6]
        rows.requires_grad_(), held.requires_grad_()
        taken += _has_kernel(rows, held)
        pieces = zip([0, *ends], ends, strict=False)
        expected = torch.cat([rows[a:b] @ matrix for (a, b), matrix in zip(pieces, held, strict=True)])
        found = grouped_product(rows, held, torch.tensor(ends, dtype=draw.choice((torch.int32, torch.int64))))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=str(seed))
        ours, theirs = (torch.autograd.grad(each, [rows, held], back) for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=str(seed))
    assert taken > 30


def test_other_ops_are_left_alone() -> None:
    assert kernel_of(torch.ops.aten.mm.default) is torch.ops.aten.mm.default
    hf.integrations.moe  # noqa: B018
    assert kernel_of(torch.ops.transformers.grouped_mm_fallback.default) is grouped_product


@pytest.mark.parametrize("micro_batches", sampled([2, 1]))
def test_a_mixture_of_experts_runs_the_kernel_of_the_plain_model(micro_batches: int) -> None:
    config = hf.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(config).train()
    ids = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    model(**batch).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with autopart.compile(model, "cpu:1", sample=batch, micro_batches=micro_batches, costs="analytic") as pipe:
        with Seen() as seen:
            pipe.step(batch)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert "aten::_grouped_mm" in seen.names
    assert not any("grouped_mm_fallback" in name for name in seen.names)
    assert all((found[name] - grad).abs().max() <= 1e-5 * grad.abs().max() for name, grad in expected.items())
