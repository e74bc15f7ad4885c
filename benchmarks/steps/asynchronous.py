"""Throughput of asynchronous training, beside synchronous 1F1B and what the slowest stage allows.

GPT-2 and loss of step_time.py (8 layers, hidden 256, vocabulary 1024, sequence 128, batches of 8 rows, fp32, dropout
off), AdamW; 2 Gloo ranks with 1 thread each.  Synchronous 1F1B with an optimizer step for each batch, PipeDream and
PipeDream-2BW alternate in one run, a window of batches each; ratios are taken pair by pair.  With 8 micro-batches a
micro-batch is one row, which a stage has done in 30 ms: what is lost on each message then counts for more.

A window begins some batches after the ranks have met.  Just then all of them have taken equally many batches, so the
later stages wait once for the first one: what follows is the pace of a pipeline that stays full, as in training.  Each
rank times the same batches; the longest of these times is that of the window.

"Slowest stage": the larger of the times that the ranks spend in forwards, backwards and updates of a window.  The share
reached is that time over the window's.  Ranks that share cores with other work reach less.

    python -m benchmarks.steps.asynchronous         about 4 minutes on 2 idle cores; writes results/asynchronous.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist

import autopart
from benchmarks.shared.alternation import alternate
from benchmarks.shared.common import ratio, spread, write
from benchmarks.steps.step_time import BATCH, SEQ, VOCAB, gpt2

SYNCHRONOUS = "1F1B"
LEAD = 3
"""Batches before a window: one more than the stages."""
VARIANTS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"schedule": "1f1b", "micro_batches": 8},
    "PipeDream": {"schedule": "pipedream", "micro_batches": 1},
    "PipeDream, 8 micro-batches": {"schedule": "pipedream", "micro_batches": 8},
    "PipeDream-2BW, 2 micro-batches": {"schedule": "pipedream-2bw", "micro_batches": 2},
    "PipeDream-2BW, 8 micro-batches": {"schedule": "pipedream-2bw", "micro_batches": 8},
}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def variant(options: dict[str, Any], batch: dict[str, torch.Tensor], cut: str) -> tuple[Callable[[], Any], Any]:
    """Return a function that trains on one batch, and its pipe."""
    pipe = autopart.compile(gpt2(), "cpu:2", sample=batch, cuts=(cut,), costs="analytic", **options)
    if options["schedule"] != "1f1b":
        training = iter(pipe.train(itertools.repeat(batch), optimizer=optimizer_of))
        return partial(next, training), pipe
    optimizer = optimizer_of(list(pipe.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(batch)
        optimizer.step()

    return step, pipe


def window(step: Callable[[], Any], pipe: Any, batches: int) -> tuple[float, float]:
    """Train on some batches, and return the seconds that they took this rank, and those in which it computed."""
    for _ in range(LEAD):
        step()
    outside, start = 0.0, time.perf_counter()
    with pipe.traced() as spans:
        for _ in range(batches):
            began, played = time.perf_counter(), len(spans)
            step()
            if pipe.plan.schedule == "1f1b":  # the optimizer steps behind the program
                last = max(span.end_ns for span in spans[played:])
                outside += max(0.0, time.perf_counter() - began - last * 1e-9)
        seconds = time.perf_counter() - start
        return seconds, outside + sum(s.end_ns - s.start_ns for s in spans if s.action.kind in "FBU") * 1e-9


def measure(rounds: int, warmup: int, batches: int, cut: str) -> dict[str, Any]:
    """Run every variant once per round on one rank; return seconds of windows, and of the slowest stage in them."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    made = {name: variant(options, batch, cut) for name, options in VARIANTS.items()}
    steps = {name: partial(window, step, pipe, batches) for name, (step, pipe) in made.items()}
    measured = alternate(steps, rounds, warmup)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measured.results)
    longest = {
        name: [[max(each) for each in zip(*both, strict=True)] for both in zip(*(r[name] for r in ranks), strict=True)]
        for name in steps
    }
    return {
        "seconds": {name: [seconds for seconds, _ in own] for name, own in longest.items()},
        "slowest": {name: [computed for _, computed in own] for name, own in longest.items()},
    }


def report(found: dict[str, Any], batches: int, cut: str, *, keep: bool) -> None:
    """Print medians and quartiles, and write them."""
    seconds, slowest = found["seconds"], found["slowest"]
    each = {name: spread([value / batches for value in values]) for name, values in seconds.items()}
    shares = {name: ratio(slowest[name], seconds[name]) for name in seconds}
    faster = {name: ratio(seconds[SYNCHRONOUS], seconds[name]) for name in seconds if name != SYNCHRONOUS}
    print(f"\nGPT-2, cut at {cut}, 2 ranks x 1 thread, windows of {batches} batches; seconds of a batch")
    for name, value in each.items():
        share = shares[name]
        print(f"  {name:32s} {value}, slowest stage {share.median:.1%} of it  [{share.low:.1%}, {share.high:.1%}]")
    for name, value in faster.items():
        print(f"  {SYNCHRONOUS} / {name:32s} {value.median:.3f}x  [{value.low:.3f}, {value.high:.3f}]")
    if keep:
        content = {"seconds_of_a_batch": each, "share_of_slowest_stage": shares, "times_as_fast_as_1f1b": faster}
        print("written to", write("asynchronous", content).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8, help="batches of a window")
    parser.add_argument("--cut", default="transformer.h.4", help="module path at which the second stage begins")
    parser.add_argument("--dry", action="store_true", help="print alone, write no result")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = autopart.launch(measure, "cpu:2", given.rounds, given.warmup, given.batches, given.cut)
    report(results[0], given.batches, given.cut, keep=not given.dry)


if __name__ == "__main__":
    main()
