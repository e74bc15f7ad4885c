"""Step time of two replicas compared with DistributedDataParallel, and the overlap of the gradient all-reduce.

GPT-2, 8 layers, hidden 256, vocabulary 1024, sequence 128, batch 8, one micro-batch, fp32, dropout off, fused AdamW in
the step; 2 Gloo ranks with 1 thread each, each with half of the rows; every rank keeps the optimizer's whole state, as
with DistributedDataParallel (`zero=0`). autopart, autopart with all gradients summed after the backward pass, and
torch's DistributedDataParallel alternate in one run; ratios are taken pair by pair. Losses and, at the end, parameters
are compared.

Two settings: the loopback with the default buckets of 25 MB, and two network namespaces with a limited link
(`hosts.py`) and buckets of 1 MB, where the sum takes time on the wire instead of processor time.

The duration of the sum is the difference between summing afterwards and not summing (DistributedDataParallel's
no_sync). The backward pass could cover what is sent while it still runs: each bucket from when it is full, one after
the other, at the rate of the whole sum. "Hidden": (summed afterwards - overlapped) / that; medians.

Limits: the threads that sum use the cores that compute, for about as long as the sum over the loopback takes. Nothing
hides that time unless there are more cores than ranks, and it counts as not hidden.

    python -m benchmarks.steps.replicas             about 3 minutes on 2 cores; writes results/replicas.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopart
from autopart.ir.program import BUCKET_BYTES
from autopart.runtime.sums.replicas import ReplicaSums
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import adamw
from benchmarks.shared.common import ratio, spread, write
from benchmarks.shared.hosts import leave, on_both, why_not
from benchmarks.steps.step_time import BATCH, HIDDEN, LAYERS, SEQ, VOCAB, gpt2

OURS, BEHIND, PEER, ALONE = "autopart", "autopart, summed behind", "torch DDP", "torch without sums"
CLAIM, HIDDEN_CLAIM = 0.98, 0.8
"""Least ratio to the speed of DistributedDataParallel, and least hidden share of what could be hidden."""
LINK_MBIT, LINK_BUCKET_BYTES = (500, 1000), 1 << 20
"""Rates of the limited links, and the bucket size over them."""


class Releases:
    """When buckets are full, in seconds before the backward pass ends, and their sizes."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.sizes: list[int] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the steps inside."""
        launch, finish = ReplicaSums._launch_full, ReplicaSums.finish
        full: list[float] = []

        def launched(sums: ReplicaSums) -> None:
            launch(sums)
            full.extend([time.perf_counter()] * (sums._launched - len(full)))

        def finished(sums: ReplicaSums, *args: Any, **kwargs: Any) -> None:
            end = time.perf_counter()
            self.sizes = [bucket.flat.nbytes for bucket in sums._buckets]
            finish(sums, *args, **kwargs)
            self.steps.append([end - at for at in full])
            full.clear()

        with mock.patch.multiple(ReplicaSums, _launch_full=launched, finish=finished):
            yield

    def coverable(self, seconds: float) -> float:
        """Return how much of a sum of `seconds` fits beside the backward pass; median of the steps."""
        return statistics.median(_covered(before, self.sizes, seconds) for before in self.steps)


def _covered(before: Sequence[float], sizes: Sequence[int], seconds: float) -> float:
    """Return the covered seconds of one step. Bucket i is full before[i] seconds before the end."""
    done = -float("inf")
    for ready, size in zip(before, sizes, strict=True):
        done = max(done, -ready) + seconds * size / sum(sizes)
    return seconds - max(0.0, done)


def ours(ids: torch.Tensor, bucket_bytes: int, *, overlapped: bool) -> tuple[Callable[[], float], autopart.Pipe]:
    batch = {"input_ids": ids, "labels": ids}
    pipe = autopart.compile(
        gpt2(), "cpu:2", sample=batch, micro_batches=1, stages=1, replicas=2, costs="analytic",
        bucket_bytes=bucket_bytes, zero=0,
    )  # fmt: skip
    optimizer = adamw(pipe.parameters())
    arm = ReplicaSums.arm if overlapped else lambda *_: None

    def step() -> float:
        with mock.patch.object(ReplicaSums, "arm", arm):
            loss = pipe.step(batch).item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, pipe


def peer(ids: torch.Tensor, bucket_bytes: int, *, summed: bool) -> tuple[Callable[[], float], torch.nn.Module]:
    mine = ids.chunk(2)[dist.get_rank()]
    model = DistributedDataParallel(gpt2(), bucket_cap_mb=bucket_bytes / 2**20)
    optimizer = adamw(model.parameters())

    def step() -> float:
        model.require_backward_grad_sync = summed
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / 2  # both have the same number of tokens
        dist.all_reduce(total)
        return total.item()

    return step, model


def measure(rounds: int, warmup: int, bucket_bytes: int) -> dict[str, Any]:
    """Run every variant once per round on one rank; return seconds by variant and differences of losses and
    parameters.
    """
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    first, pipe = ours(ids, bucket_bytes, overlapped=True)
    second, _ = ours(ids, bucket_bytes, overlapped=False)
    third, model = peer(ids, bucket_bytes, summed=True)
    fourth, _ = peer(ids, bucket_bytes, summed=False)
    measured = alternate({OURS: first, BEHIND: second, PEER: third, ALONE: fourth}, rounds, warmup)
    losses = zip(measured.results[OURS], measured.results[PEER], strict=True)
    apart = max(abs(mine - its) / its for mine, its in losses)
    ddp = dict(model.module.named_parameters())
    off = max((p - ddp[n]).abs().max().item() for n, p in pipe.named_parameters())
    releases = Releases()
    with releases.noted():
        for _ in range(5):
            first()
    middle = {name: statistics.median(values) for name, values in measured.seconds.items()}
    whole = max(0.0, middle[BEHIND] - middle[ALONE])
    return {
        "seconds": measured.seconds, "losses_apart": apart, "parameters_apart": off, "sum_seconds": whole,
        "coverable_seconds": releases.coverable(whole), "buckets": len(releases.sizes),
    }  # fmt: skip


def report(where: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the results and return what is recorded."""
    seconds = found.pop("seconds")
    print(f"\n{where}: GPT-2 {LAYERS} layers, hidden {HIDDEN}, batch {BATCH}; 1 stage x 2 replicas, 2 ranks x 1 thread")
    for name, values in seconds.items():
        print(f"  {name:24s} {spread(values)}")
    speed = ratio(seconds[PEER], seconds[OURS])
    print(f"  {PEER} / {OURS}: {speed.median:.3f}x  [{speed.low:.3f}, {speed.high:.3f}]")
    covered, whole = found["coverable_seconds"], found["sum_seconds"]
    saved = statistics.median(seconds[BEHIND]) - statistics.median(seconds[OURS])
    hidden = saved / covered if covered > 0 else 0.0
    print(
        f"  sum {whole * 1e3:.1f} ms, of which the backward pass can cover {covered * 1e3:.1f} ms; hidden {hidden:.0%}"
    )
    print(f"  differences: losses {found['losses_apart']:.1e}, parameters {found['parameters_apart']:.1e}")
    return {"seconds": {k: spread(v) for k, v in seconds.items()}, "speed": speed, "hidden": hidden, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--mbit", type=int, nargs="+", default=list(LINK_MBIT), help="rates of the limited links in Mbit/s"
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if given.rank_of:
        leave(measure(given.rounds, given.warmup, LINK_BUCKET_BYTES), given.rank_of)
        return
    local = autopart.launch(measure, "cpu:2", given.rounds, given.warmup, BUCKET_BYTES)[0]
    content: dict[str, Any] = {"loopback": report("loopback", local)}
    claims = {f"at least {CLAIM} of the speed of DistributedDataParallel": content["loopback"]["speed"].median >= CLAIM}
    if reason := why_not():
        print(f"no limited link: {reason}")
    else:
        rounds = ["--rounds", str(given.rounds), "--warmup", str(given.warmup)]
        content["links"] = []
        for mbit in given.mbit:
            linked = report(f"link of {mbit} Mbit/s", on_both("benchmarks.steps.replicas", rounds, mbit, whole=True))
            content["links"].append({"mbit": mbit, **linked})
            claim = f"{mbit} Mbit/s: at least {HIDDEN_CLAIM:.0%} of what the backward pass could cover is hidden"
            claims[claim] = linked["hidden"] >= HIDDEN_CLAIM
    print("written to", write("replicas", {**content, "claims": claims}).name)


if __name__ == "__main__":
    main()
