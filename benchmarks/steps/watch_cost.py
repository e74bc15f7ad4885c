"""The cost per step of checking that the model has not changed since its capture.

Models of 1,000 modules, captured and unchanged: microseconds of `CaptureCache.refresh`, the fastest of many runs.
"blocks": a user's module with an attribute, a linear layer, a norm and an activation, repeated; "gpt2": GPT-2 of
transformers with as many blocks as needed. Expected: linear, at most 200 us for 1,000 modules.

    python -m benchmarks.steps.watch_cost          15 seconds; writes results/watch_cost.json
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.graph import Size
from benchmarks.shared.common import write

RUNS = 300


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.activation = nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.activation(self.linear(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self, modules: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(4) for _ in range(modules // 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def gpt2(modules: int) -> nn.Module:
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(n_embd=8, n_layer=modules // 13, n_head=2, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config).train()


def refresh_us(model: nn.Module, batch: object) -> float:
    """Return the microseconds of one check of an unchanged model."""
    captures = CaptureCache(model)
    captures(flatten(batch), Size(2))
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        changes = captures.refresh(training=True)
        best = min(best, time.perf_counter() - began)
        assert not changes
    return best * 1e6


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.zeros(2, 8, dtype=torch.long)
    rows = []
    for name, build, batch in (
        ("blocks", Blocks, torch.randn(2, 4)),
        ("gpt2", gpt2, {"input_ids": ids, "labels": ids}),
    ):
        for modules in (1000,):
            model = build(modules)
            count = sum(1 for _ in model.modules())
            took = refresh_us(model, batch)
            rows.append({"model": name, "modules": count, "us": took, "us_per_1000": 1000 * took / count})
            print(f"{name:8} {count:6} modules {took:8.0f} us, {1000 * took / count:6.0f} for 1,000")
    print(
        write(
            "watch_cost",
            {"rows": rows, "claims": {"at most 200 us for 1,000": all(r["us_per_1000"] <= 200 for r in rows)}},
        )
    )


if __name__ == "__main__":
    main()
