"""Schedules compared with those of torch.distributed.pipelining: same model, cuts, micro-batches and placement.

A decoder like GPT-2, without values that skip a block (torch's schedules of several stages refuse these), built in
parts for torch, so that it need not trace:
8 layers, hidden 256, vocabulary 1024, sequence 128, batch 8, 8 micro-batches, fp32, fused AdamW in the step; 2 Gloo
ranks with 1 thread each.  One stage on each rank (1F1B, GPipe) or two (interleaved, zero bubble; ZB-V
with a V placement).  All variants alternate in one run; ratios are taken pair by pair.  Beside the seconds: the
simulated step of the plan, on the machine as `autopart cluster detect` measures it, and of the times that its computes
had in each step (`busy.py`); the most memory of activations that the plan expects; and the most bytes that torch's
profiler sees allocated at once in a further step on each rank, beyond those before it.

Limits: torch has ZB-H1 only for several stages on a rank (`ScheduleInterleavedZeroBubble`), which is compared with our
zb-h1 of one stage on each, and with our searched order of two.

On CPUs that are not Intel's our large products take oneDNN, torch's MKL (`runtime/stages/products.py`).
`--same-kernels` turns that off: what is left is the gain of the schedules and of the runtime.

    python -m benchmarks.steps.schedules            about 4 minutes on 2 cores; writes results/schedules.json
    python -m benchmarks.steps.schedules --same-kernels        writes results/schedules_same_kernels.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import autopart
from autopart.cli.host_costs import detect_all
from benchmarks.planning.peak_memory import allocated
from benchmarks.shared.alternation import alternate
from benchmarks.shared.architectures import seeded
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.busy import Busy, allowed_seconds, busy
from benchmarks.shared.common import ratio, spread, write
from benchmarks.steps.step_time import BATCH, HIDDEN, LAYERS, MICROS, SEQ, VOCAB, next_token_loss

HALVES = ("blocks.4",)
QUARTERS = ("blocks.2", "blocks.4", "blocks.6")
OURS: dict[str, dict[str, Any]] = {
    "1f1b": {"cuts": HALVES},
    "gpipe": {"cuts": HALVES},
    "zb-h1": {"cuts": HALVES},
    "interleaved": {"cuts": QUARTERS, "stages_per_rank": 2},
    "zb-v": {"cuts": QUARTERS, "stages_per_rank": 2},
    "searched": {"cuts": QUARTERS, "stages_per_rank": 2},
}
TORCH: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "1f1b": (Schedule1F1B, ((0,), (1,))),
    "gpipe": (ScheduleGPipe, ((0,), (1,))),
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "zb-v": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}
"""torch's schedules, and the stages of each rank."""
PEERS = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved", "zb-v": "zb-v",
         "zb-h1": "interleaved zero bubble", "searched": "interleaved zero bubble"}  # fmt: skip
LEAST, LEAST_OF_BEST = 1.15, 1.25
"""What is asked of each schedule beside torch's, and of our best beside torch's best."""


class Block(nn.Module):
    """A pre-norm block: causal attention of 4 heads, and an MLP four times as wide."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, hidden)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Blocks, in front of them embeddings, behind them a head, if they are the first and the last ones.  The loss is
    computed outside, as torch's pipeline wants it.
    """

    def __init__(self, first: int = 0, end: int = LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN) if not first else None
        self.blocks = nn.Sequential(*(Block(HIDDEN) for _ in range(first, end)))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)) if end == LAYERS else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(given) if self.tokens is not None else given)
        return x if self.head is None else self.head(x)


def torch_steps(
    ids: torch.Tensor, schedule: Any, stages: Sequence[int], count: int
) -> tuple[Callable[[], Any], Iterable[nn.Parameter]]:
    """Return a forward and backward of the whole batch by torch, and the parameters of this rank.

    stages: of this rank, of `count` with equally many blocks.
    """
    each = LAYERS // count
    parts = {s: seeded(lambda s=s: Decoder(s * each, (s + 1) * each), seed=s) for s in stages}
    own = [PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    runner = schedule(own if len(own) > 1 else own[0], MICROS, loss_fn=next_token_loss)
    given, targeted = 0 in stages, count - 1 in stages

    def step() -> None:
        runner.step(*([ids] if given else []), **({"target": ids, "losses": []} if targeted else {}))

    return step, [p for part in parts.values() for p in part.parameters()]


def measure(cluster: autopart.Cluster, rounds: int, warmup: int, same_kernels: bool) -> dict[str, Any]:
    """Run every variant once per round on one rank; return seconds by variant, and what the plans of ours expect."""
    torch.set_num_threads(1)
    if same_kernels:
        torch.backends.mkldnn.enabled = False
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    common: dict[str, Any] = {"sample": (ids, ids), "loss_fn": next_token_loss, "micro_batches": MICROS}
    steps: dict[str, Callable[[], Any]] = {}
    pipes: dict[str, autopart.Pipe] = {}
    for name, options in OURS.items():
        pipes[name] = pipe = autopart.compile(seeded(Decoder, seed=0), cluster, schedule=name, **common, **options)
        step = training_step(partial(pipe.step, ids, ids), pipe.parameters())
        steps[f"autopart {name}"] = partial(traced, step, pipe)
    for name, (schedule, placed) in TORCH.items():
        own = torch_steps(ids, schedule, placed[dist.get_rank()], sum(map(len, placed)))
        steps[f"torch {name}"] = training_step(*own)
    measured = alternate(steps, rounds, warmup)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: allocated(step) for name, step in steps.items()})
    peaks = {name: [rank[name] for rank in ranks] for name in steps}
    dist.all_gather_object(ranks, {name: measured.results[f"autopart {name}"] for name in pipes})
    plans = {name: expected(pipe.plan) for name, pipe in pipes.items()}
    for name, pipe in pipes.items():
        each = zip(*(rank[name] for rank in ranks), strict=True)
        plans[name]["allowed by busy times"] = [allowed_seconds(pipe.program, own) for own in each]
    return {"seconds": measured.seconds, "expected": plans, "peaks": peaks}


def traced(step: Callable[[], Any], pipe: autopart.Pipe) -> Busy:
    """Run a step, and return the times of its computes."""
    began = time.perf_counter()
    with pipe.traced() as spans:
        step()
    return busy(spans, time.perf_counter() - began)


def expected(plan: autopart.Plan) -> dict[str, Any]:
    """Return the simulated step in seconds, and the activations of all stages in bytes."""
    held = sum(estimate.activation_bytes * estimate.live for estimate in plan.estimates)
    return {"simulated step": plan.outlook.step_ns * 1e-9, "activation bytes": held, "bubble": plan.outlook.bubble}


def report(found: Mapping[str, Any], *, out: str) -> None:
    seconds: Mapping[str, list[float]] = found["seconds"]
    plans: Mapping[str, dict[str, Any]] = found["expected"]
    for name, values in seconds.items():
        sizes = ", ".join(f"{peak / 1e6:.1f}" for peak in found["peaks"][name])
        print(f"  {name:32s} {spread(values)}  peak {sizes} MB")
    ratios = {
        f"torch {peer} / autopart {mine}": ratio(seconds[f"torch {peer}"], seconds[f"autopart {mine}"])
        for mine, peer in PEERS.items()
    }
    best = {who: min((n for n in seconds if n.startswith(who)), key=lambda n: spread(seconds[n]).median)
            for who in ("torch", "autopart")}  # fmt: skip
    ratios[f"best: {best['torch']} / {best['autopart']}"] = ratio(seconds[best["torch"]], seconds[best["autopart"]])
    for name, value in ratios.items():
        asked = LEAST_OF_BEST if name.startswith("best") else LEAST
        print(f"  {name:56s} {value.median:.3f}x  [{value.low:.3f}, {value.high:.3f}]  asked {asked}x")
    off = {
        name: plan["simulated step"] / spread(seconds[f"autopart {name}"]).median - 1 for name, plan in plans.items()
    }
    for name, share in off.items():
        print(f"  {name:12s} simulated {plans[name]['simulated step']:.4f} s, {share:+.1%} of the measured step")
    fed = {name: ratio(plan.pop("allowed by busy times"), seconds[f"autopart {name}"]) for name, plan in plans.items()}
    for name, value in fed.items():
        print(f"  {name:12s} simulated with busy times {value.median - 1:+.1%} of the measured step")
    content = {"seconds": {k: spread(v) for k, v in seconds.items()}, "ratios": ratios, "plans": plans,
               "peak bytes of a step, by rank": found["peaks"]}  # fmt: skip
    both = {"simulated / measured - 1": off, "simulated with busy times / measured": fed}
    print("written to", write(out, {**content, **both}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--same-kernels", action="store_true", help="multiply with torch's default on both sides")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = detect_all(2)
    results = autopart.launch(measure, "cpu:2", cluster, given.rounds, given.warmup, given.same_kernels)
    out = "schedules_same_kernels" if given.same_kernels else "schedules"
    report(results[0], out=out)


if __name__ == "__main__":
    main()
