"""A device that gets slow: how soon it is named, and how much faster a step is under the plan that follows.

Two Gloo ranks with 1 thread, each bound to a core of its own.  After some steps two busy loops start on the core of
rank 1, which leaves it a third.  When the rank is named (`pipe.stragglers`), `pipe.replan` looks for another plan.
Costs of ops are measured when the first plan is made.  Losses are not looked at here:
tests/e2e/failures/test_elastic.py compares them with plain training.

    python -m benchmarks.training.stragglers                two minutes on 2 idle cores; writes results/stragglers.json
    python -m benchmarks.training.stragglers --width 256    small, writes nothing
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import autopart
from benchmarks.shared.common import shape_of, spread, write

LAYERS, ROWS, SLOW_RANK, LOOPS = 8, 512, 1, 2
HEALTHY, MOST, MEASURED = 20, 60, 30
"""Steps before the loops start, steps to wait for a name, and steps that are measured."""
WITHIN, FASTER = 20, 1.3
"""What is asked: steps until the rank is named, and how many times as fast a step is then."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run busy loops on the cores to which this process is bound."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def measure(width: int) -> dict[str, Any]:
    """Train, get slow, change the plan, and train on; return the seconds of steps and when the rank was named."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))
    x, y = torch.randn(2, ROWS, width, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "measured"}
    with autopart.compile(model, "cpu:2", sample=(x, y), **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

        def step() -> float:
            began = time.perf_counter()
            optimizer.zero_grad()
            pipe.step((x, y))
            optimizer.step()
            return time.perf_counter() - began

        plans = [shape_of(pipe.plan)]
        healthy = [step() for _ in range(HEALTHY)]
        with busy_loops(LOOPS if rank == SLOW_RANK else 0):
            named = 0
            for number in range(1, MOST + 1):
                step()
                if SLOW_RANK in pipe.stragglers:
                    named = number
                    break
            slowness = dict(pipe.stragglers)
            before = [step() for _ in range(MEASURED)]
            found = pipe.replan(optimizer, steps=1000)
            after = [step() for _ in range(MEASURED)]
        plans.append(shape_of(pipe.plan))
    return {
        "healthy": healthy, "named after": named, "slowness": slowness, "before": before, "after": after,
        "reason": found.reason, "adopted": found.adopted, "pause": found.took_s, "plans": plans,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = []
    for _ in range(given.rounds):
        found = autopart.launch(measure, "cpu:2", given.width)[0]
        times = {name: spread(found.pop(name)[2:]) for name in ("healthy", "before", "after")}
        faster = times["before"].median / times["after"].median
        rounds.append(found | {name: asdict(each) for name, each in times.items()} | {"times as fast": faster})
        print(f"named after {found['named after']} steps, asked {WITHIN}: {found['slowness']}; {found['reason']}")
        print("\n".join(f"  step {name}: {each}" for name, each in times.items()))
        print(f"  {faster:.2f} times as fast, asked {FASTER}; {' -> '.join(found['plans'])}")
    if given.width == parser.get_default("width"):
        print("written to", write("stragglers", {"rounds": rounds}).name)


if __name__ == "__main__":
    main()
