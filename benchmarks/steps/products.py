"""Matrix products of a step in fp32 by torch's default, MKL, and by oneDNN, on one thread.

Forward, gradient of the input and gradient of the weight, added to what is there, of linear layers of several sizes.
Both kernels alternate; ratios are taken pair by pair.

    python -m benchmarks.steps.products    half a minute; writes results/products.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from autopart.runtime.stages.products import are_faster, multiply
from benchmarks.shared.common import ratio, spread, write

SIZES = ((128, 128, 128), (128, 256, 256), (128, 1024, 256), (1024, 1024, 256), (128, 3072, 768))
"""Rows, features of the result, features of the input."""


def products(rows: int, out: int, given: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return by name a product as torch computes it, and as autopart does."""
    source = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=source) for shape in ((rows, given), (out, given), (rows, out)))
    total = torch.zeros(out, given)
    return {
        "forward": (lambda: torch.nn.functional.linear(x, weight), lambda: multiply(x, weight.t())),
        "of input": (lambda: grad.mm(weight), lambda: multiply(grad, weight)),
        "of weight": (lambda: total.addmm_(grad.t(), x), lambda: total.add_(multiply(grad.t(), x))),
    }


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"oneDNN is used here": are_faster()}
    for size in SIZES:
        title = "{} rows, {} x {}".format(*size)
        for name, calls in products(*size).items():
            times = [[timed(call) for call in calls] for _ in range(given.rounds + 3)][3:]
            theirs, ours = map(list, zip(*times, strict=True))
            each = {"torch": spread(theirs), "autopart": spread(ours), "torch / autopart": ratio(theirs, ours)}
            content[f"{title}, {name}"] = each
            print(f"{title:24s} {name:10s} {each['torch / autopart'].median:.2f}x")
    print("written to", write("products", content).name)


if __name__ == "__main__":
    main()
