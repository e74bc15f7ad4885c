"""Step time with many small micro-batches, where the runtime's work for each of them counts, beside torch's pipelining.

Seven linear layers of 64 features, cut in the middle; 8 to 64 micro-batches of two rows, 1F1B, fp32, 2 Gloo ranks with
1 thread each. autopart and torch.distributed.pipelining alternate in one run; ratios are taken pair by pair.

    python -m benchmarks.steps.small_micro_batches    1 minute on 2 cores; writes results/small_micro_batches.json
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import autopart
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.common import ratio, spread, write
from benchmarks.shared.torch_pipeline import torch_pipeline

FEATURES, CLASSES, ROWS = 64, 10, 2
MICROS = (8, 32, 64)
CUT = "6"


def mlp() -> nn.Sequential:
    """Return the model with the same weights every time."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(FEATURES, FEATURES), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(FEATURES, CLASSES))


def measure(micros: int, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Return seconds of the steps of one rank, by system."""
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(micros * ROWS, FEATURES, generator=source)
    labels = torch.randint(0, CLASSES, (len(rows),), generator=source)
    loss, batch = nn.functional.cross_entropy, (rows, labels)
    options: dict[str, Any] = {"micro_batches": micros, "schedule": "1f1b", "cuts": (CUT,), "costs": "analytic"}
    pipe = autopart.compile(mlp(), "cpu:2", sample=batch, loss_fn=loss, **options)
    peer, parameters = torch_pipeline(
        mlp(), "input", rows, labels, loss, cuts=(CUT,), micros=micros, schedule=Schedule1F1B
    )
    steps = {
        "autopart": training_step(partial(pipe.step, batch), pipe.parameters()),
        "torch": training_step(peer, parameters),
    }
    return alternate(steps, rounds, warmup).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    content = {}
    for micros in MICROS:
        seconds = autopart.launch(measure, "cpu:2", micros, given.rounds, given.warmup)[0]
        faster = ratio(seconds["torch"], seconds["autopart"])
        print(f"{micros} micro-batches: torch / autopart {faster.median:.3f}x  [{faster.low:.3f}, {faster.high:.3f}]")
        for name, values in seconds.items():
            print(f"  {name:10s} {spread(values)}")
        content[f"{micros} micro-batches"] = {
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "torch / autopart": faster,
        }
    print("written to", write("small_micro_batches", content).name)


if __name__ == "__main__":
    main()
