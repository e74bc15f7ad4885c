"""What is remembered of torch's composite ops changes no program, and leaves the ops as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export.exported_program import _collect_all_valid_cia_ops

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.capture.trace import composite_ops


class Attention(nn.Module):
    """Composite ops of several kinds: attention, linear, layer norm, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return nn.functional.mse_loss(nn.functional.dropout(self.out(mixed), 0.1), x)


def captured() -> str:
    return str(capture(Attention(), flatten(((torch.ones(2, 4, 8),), {}))).graph)


def kernels() -> dict[Any, dict[Any, Any]]:
    captured()  # imports what registers more ops
    return {op: dict(op.py_kernels) for op in _collect_all_valid_cia_ops()}


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composite_ops, "_kernels", {})


@pytest.mark.usefixtures("forgotten")
def test_a_program_is_captured_alike_the_first_and_the_second_time_and_ops_keep_their_kernels() -> None:
    before = kernels()
    programs = [captured() for _ in range(3)]
    assert programs[0] == programs[1] == programs[2]
    assert composite_ops._kernels.keys() >= before.keys()
    assert kernels() == before


@pytest.mark.usefixtures("forgotten")
def test_kernels_that_were_changed_in_between_are_left_to_torch() -> None:
    op = torch.ops.aten.linear.default
    program = captured()
    op.py_impl(torch._C.DispatchKey.XLA)(lambda *args: None)
    try:
        before = kernels()
        assert captured() == program and kernels() == before
    finally:
        del op.py_kernels[torch._C.DispatchKey.XLA]
        op._dispatch_cache.clear()
    assert captured() == program
