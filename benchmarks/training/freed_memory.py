"""A step of ranks that keep freed memory, beside one of ranks that give it back to the system (`runtime.heap`).

Two Gloo ranks, one thread each, two stages; each kind of rank has processes of its own, which alternate. Seconds of a
step, seconds of the processor in it, pages that the system had to give, and the largest resident memory of a rank.

    python -m benchmarks.training.freed_memory        about 5 minutes on 2 cores; writes results/freed_memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import autopart
from autopart.runtime import heap
from benchmarks.shared.bench_models import MODELS
from benchmarks.shared.common import ratio, spread, write

CASES = ("gpt2", "gpt2, vocabulary 50257", "t5", "convnext")
MICRO_BATCHES, STEPS, WARMUP = 4, 12, 3


def steps(name: str, keep: bool) -> dict[str, Any]:
    """Return what steps of a model take on one rank."""
    torch.set_num_threads(1)
    if not keep:
        heap.keep_freed_memory = lambda: False  # type: ignore[assignment]
    model = MODELS[name]
    batch = model.batch()
    pipe = autopart.compile(
        model.model(), "cpu:2", sample=batch, stages=2, micro_batches=MICRO_BATCHES, schedule="1f1b",
        costs="analytic", optimizer="sgd",
    )  # fmt: skip
    taken = []
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            before = resource.getrusage(resource.RUSAGE_SELF)
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        pipe.step(batch)
        dist.barrier()
        taken.append(time.perf_counter() - began)
    after = resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": statistics.median(taken[WARMUP:]),
        "processor": processor / STEPS,
        "pages": (after.ru_minflt - before.ru_minflt) / STEPS,
        "peak": after.ru_maxrss << 10,
    }


def alone(name: str, keep: bool) -> dict[str, Any]:
    """Return what steps take in processes of their own: of the slower rank, and pages of both."""
    env = {**os.environ, **{name: value if keep else "0" for name, value in heap.HUGE_PAGES.items()}}
    command = [sys.executable, "-m", "benchmarks.training.freed_memory", "--model", name, *(["--keep"] if keep else [])]
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", default="", help="one kind of rank and one model: prints what it finds")
    parser.add_argument("--keep", action="store_true", help="with --model: whether ranks keep freed memory")
    given = parser.parse_args()
    if given.model:
        ranks = autopart.launch(steps, "cpu:2", given.model, given.keep)
        largest = {key: max(rank[key] for rank in ranks) for key in ("seconds", "peak")}
        print(json.dumps(largest | {key: sum(rank[key] for rank in ranks) for key in ("processor", "pages")}))
        return
    content: dict[str, Any] = {}
    for name in CASES:
        pairs = [(alone(name, False), alone(name, True)) for _ in range(given.rounds)]
        back, kept = ([pair[place] for pair in pairs] for place in (0, 1))
        found = {
            title: {
                "step": spread([run["seconds"] for run in runs]),
                "processor_seconds": spread([run["processor"] for run in runs]),
                "pages_a_step": statistics.median(run["pages"] for run in runs),
                "peak_bytes": statistics.median(run["peak"] for run in runs),
            }
            for title, runs in (("given back", back), ("kept", kept))
        }
        times = ratio(*([run["seconds"] for run in runs] for runs in (back, kept)))
        cpu = ratio(*([run["processor"] for run in runs] for runs in (back, kept)))
        content[name] = {**found, "given back / kept": times, "given back / kept, processor": cpu}
        memory = found["kept"]["peak_bytes"] / found["given back"]["peak_bytes"]  # type: ignore[operator]
        print(f"{name:24s} step {times.median:.2f}x, processor {cpu.median:.2f}x, memory {memory:.2f}x", flush=True)
    print("written to", write("freed_memory", content).name)


if __name__ == "__main__":
    main()
