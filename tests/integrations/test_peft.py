"""peft's adapters train over two ranks as in one process: kinds of adapters, another adapter, quantized bases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.jobs import peft_jobs as jobs
from support.workers import Workers

import autopart
from autopart.ir.errors import RefusedError

pytest.importorskip("peft")


@pytest.mark.timeout(500)
def test_kinds_of_adapters_train_exactly(pair: Workers) -> None:
    """Some ranks train nothing where the last layer alone has an adapter; adapters that start at zero hide nothing."""
    for ok in pair.run(jobs.verified, ["lora", "checkpointed", "dora", "ia3", "last layer"]):
        assert ok == {"lora": True, "checkpointed": True, "dora": True, "ia3": True, "last layer": True}


@pytest.mark.timeout(300)
def test_another_adapter_is_trained_after_a_replan_and_the_first_keeps_what_it_learned(pair: Workers) -> None:
    for refused, reason, differences in pair.run(jobs.switched):
        assert "lora_A.other.weight" in refused.what and "pipe.replan(optimizer)" in refused.fix
        assert "no place for what learns now" in reason
        assert differences and max(differences.values()) < 1e-9, differences


class Params4bit(torch.nn.Parameter):
    """Stands for the class of bitsandbytes: codes, with what they mean attached."""

    quant_state: Any

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = torch.ones(1)
        return made


class Quantized(torch.nn.Module):
    """A linear layer on a frozen quantized weight."""

    def __init__(self, codes: torch.Tensor, kind: type = Params4bit) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.inner.weight = kind(codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.inner.weight.float(), self.inner.bias).square().mean()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_a_quantized_weight_is_refused_by_name(dtype: torch.dtype) -> None:
    codes = torch.ones(8, 8).to(dtype)
    with pytest.raises(RefusedError, match=r"inner\.weight is quantized: a .*\.Params4bit") as caught:
        autopart.plan(Quantized(codes), "cpu:2", sample=torch.randn(4, 8), costs="analytic")
    assert "torch.bfloat16" in caught.value.fix
    followed = Quantized(codes, lambda data: torch.nn.Parameter(data.bfloat16(), False))  # type: ignore[arg-type]
    assert autopart.plan(followed, "cpu:1", sample=torch.randn(4, 8), costs="analytic").stages
