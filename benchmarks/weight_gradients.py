"""Does it pay that products add the gradients of their weights into `.grad`, and are the gradients the same?

Pre-norm blocks of transformers in one stage on one process, fp32, one thread. A step whose products add their gradients
in place and one that leaves this to autograd alternate in one run; measured is CPU time of the process, and ratios are
taken pair by pair. Each case runs twice, with either model made first, since the place in memory matters.

    python benchmarks/weight_gradients.py    2 minutes; writes results/weight_gradients.json
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from common import Spread, ratio, spread, write
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.stagecode import weight_products

HEADS = 4
VARIANTS = {"in place": weight_products.LEAST_ELEMENTS, "autograd": sys.maxsize}
"""Elements of the least weight whose gradient is added in place."""
CASES = ((256, 8, 4, 64), (256, 8, 16, 16), (512, 4, 4, 64), (128, 8, 4, 64))
"""Hidden size, blocks, micro-batches, tokens of each."""


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        seen = F.scaled_dot_product_attention(*(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_layers(x))))


def measure(case: tuple[int, int, int, int], rounds: int, warmup: int) -> dict[str, Any]:
    """Return the seconds of a step of each variant, their ratio, and how far the gradients are apart."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    apart = max(_measure(case, rounds, warmup, names, seconds) for names in (list(VARIANTS), list(VARIANTS)[::-1]))
    found: dict[str, Spread] = {name: spread(values) for name, values in seconds.items()}
    return {"seconds": found, "in place / autograd": ratio(seconds["in place"], seconds["autograd"]), "apart": apart}


def _measure(
    case: tuple[int, int, int, int], rounds: int, warmup: int, names: list[str], seconds: dict[str, list[float]]
) -> float:
    """Add the seconds of each step, with the models made in the order of `names`; return how far the gradients are
    apart."""
    hidden, blocks, micros, tokens = case
    batch = torch.randn(2, micros, tokens, hidden, generator=torch.Generator().manual_seed(1)).unbind()
    models: dict[str, nn.Module] = {}
    pipes = {}
    with ExitStack() as stack:
        for name in names:
            torch.manual_seed(0)
            models[name] = nn.Sequential(*(Block(hidden) for _ in range(blocks)))
            with patch.object(weight_products, "LEAST_ELEMENTS", VARIANTS[name]):
                made = autopart.compile(
                    models[name], "cpu:1", sample=batch, loss_fn=F.mse_loss, micro_batches=micros, costs="analytic"
                )
                pipes[name] = stack.enter_context(made)
                pipes[name].step(batch)  # makes the code
        for number in range(warmup + rounds):
            for name in names[:: 1 if number % 2 else -1]:
                models[name].zero_grad()
                began = time.process_time()
                pipes[name].step(batch)
                if number >= warmup:
                    seconds[name].append(time.process_time() - began)
    return _apart(*models.values())


def _apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two gradients, as a part of the largest entry of the gradient."""
    pairs = [(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)


def main() -> None:
    """Measure all cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    content = {}
    for case in CASES:
        title = "hidden {}, {} blocks, {} micro-batches of {} tokens".format(*case)
        content[title] = found = measure(case, given.rounds, given.warmup)
        taken = found["in place / autograd"]
        print(f"{title}: in place / autograd {taken.median:.3f}  [{taken.low:.3f}, {taken.high:.3f}]")
        print(f"  gradients apart by {found['apart']:.1e}")
    print("written to", write("weight_gradients", content).name)


if __name__ == "__main__":
    main()
