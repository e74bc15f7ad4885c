"""Is a step of two replicas of one stage at least as fast as one of DistributedDataParallel, and is the sum hidden?

GPT-2, 8 layers, hidden 256, vocabulary 1024, sequence 128, batch 8, one micro-batch, fp32, dropout off, fused AdamW in
the step; 2 Gloo ranks with 1 thread each, each with half of the rows.  autopart with its buckets of 25 MB, the same
with all gradients summed behind the backward, and torch's DistributedDataParallel take turns in one run; ratios are
taken pair by pair.  Losses and, at the end, parameters are compared.

"Hidden": the share of the sum that does not lengthen the step, (summed behind - overlapped) / (summed behind - no sum
at all), medians; the last is DistributedDataParallel's step under no_sync.

Assumed, and wrong where: on a CPU the threads that sum take the cores that compute, so that little can be hidden unless
there are more cores than ranks.

    python benchmarks/replicas.py             about 2 minutes on 2 cores; writes results/replicas.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from common import ratio, spread, write
from step_time import BATCH, HIDDEN, LAYERS, SEQ, VOCAB, gpt2
from torch.nn.parallel import DistributedDataParallel
from trained import adamw

import autopart
from autopart.runtime.replicas import ReplicaSums

OURS, BEHIND, PEER, ALONE = "autopart", "autopart, summed behind", "torch DDP", "torch without sums"
CLAIM = 0.98
"""Of the peer's speed, at least."""


def ours(ids: torch.Tensor, *, overlapped: bool) -> tuple[Callable[[], float], autopart.Pipe]:
    batch = {"input_ids": ids, "labels": ids}
    pipe = autopart.compile(gpt2(), "cpu:2", sample=batch, micro_batches=1, stages=1, replicas=2, costs="analytic")
    optimizer = adamw(pipe.parameters())
    arm = ReplicaSums.arm

    def step() -> float:
        ReplicaSums.arm = arm if overlapped else lambda *_: None  # type: ignore[method-assign]
        loss = pipe.step(batch).item()
        ReplicaSums.arm = arm  # type: ignore[method-assign]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, pipe


def peer(ids: torch.Tensor, *, summed: bool) -> tuple[Callable[[], float], torch.nn.Module]:
    mine = ids.chunk(2)[dist.get_rank()]
    model = DistributedDataParallel(gpt2())
    optimizer = adamw(model.parameters())

    def step() -> float:
        model.require_backward_grad_sync = summed
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / 2  # each has as many tokens
        dist.all_reduce(total)
        return total.item()

    return step, model


def measure(rounds: int, warmup: int) -> dict[str, Any]:
    """One rank: every variant once per round; seconds by variant, and how far losses and parameters are apart."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    first, pipe = ours(ids, overlapped=True)
    second, _ = ours(ids, overlapped=False)
    third, model = peer(ids, summed=True)
    fourth, _ = peer(ids, summed=False)
    steps = {OURS: first, BEHIND: second, PEER: third, ALONE: fourth}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    apart = 0.0
    for number in range(warmup + rounds):
        losses = {}
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[name] = step()
            dist.barrier()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
        apart = max(apart, abs(losses[OURS] - losses[PEER]) / losses[PEER])
    theirs = dict(model.module.named_parameters())
    off = max((p - theirs[n]).abs().max().item() for n, p in pipe.named_parameters())
    return {"seconds": seconds, "losses_apart": apart, "parameters_apart": off}


def report(found: dict[str, Any]) -> None:
    seconds = found["seconds"]
    print(f"\nGPT-2 {LAYERS} layers, hidden {HIDDEN}, batch {BATCH}; 1 stage x 2 replicas, 2 ranks x 1 thread")
    for name, values in seconds.items():
        print(f"  {name:24s} {spread(values)}")
    speed = ratio(seconds[PEER], seconds[OURS])
    print(f"  {PEER} / {OURS}: {speed.median:.3f}x  [{speed.low:.3f}, {speed.high:.3f}]")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    whole = middle[BEHIND] - middle[ALONE]
    hidden = (middle[BEHIND] - middle[OURS]) / whole if whole > 0 else 1.0
    print(f"  of a sum of {whole * 1e3:.1f} ms, {hidden:.0%} is hidden")
    print(f"  losses apart by {found['losses_apart']:.1e}, parameters by {found['parameters_apart']:.1e}")
    claims = {f"at least {CLAIM} of the speed of DistributedDataParallel": speed.median >= CLAIM}
    content = {"seconds": {k: spread(v) for k, v in seconds.items()}, "speed": speed, "hidden": hidden}
    apart = {key: found[key] for key in ("losses_apart", "parameters_apart")}
    print("written to", write("replicas", {**content, **apart, "claims": claims}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report(autopart.launch(measure, "cpu:2", given.rounds, given.warmup)[0])


if __name__ == "__main__":
    main()
