"""Is a step of autopart at least as fast as one of torch.distributed.pipelining, and as fast as its stages allow?

GPT-2, 8 layers, hidden 256, vocabulary 1024, sequence 128, batch 8, 8 micro-batches, fp32, dropout off, fused AdamW in
the step; 2 Gloo ranks with 1 thread each.  autopart 1F1B and GPipe, the peer's 1F1B and GPipe with the same cut, and
one process with one thread take turns in one run; ratios are taken pair by pair.

"Allowed": the simulator plays the same program with the medians of the forward and backward times that the stages
had in this very run and with messages that cost nothing; the share reached is that time, plus the optimizer's, over
the measured step.

    python benchmarks/step_time.py            about 2 minutes on 2 cores; writes results/step_time.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from common import ratio, spread, write
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

import autopart
from autopart.passes.simulate import simulate

LAYERS, HIDDEN, VOCAB, SEQ, BATCH, MICROS = 8, 256, 1024, 128, 8, 8
PEER = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
OURS = {"autopart 1F1B": "1f1b", "autopart GPipe": "gpipe"}


class Logits(torch.nn.Module):
    """The peer computes its loss outside the model: what is traced returns logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def gpt2() -> torch.nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def one_process(ids: torch.Tensor) -> Callable[[], None]:
    model = gpt2()
    optimizer = adamw(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(schedule: str, ids: torch.Tensor, cut: str) -> tuple[Callable[[], None], autopart.Pipe]:
    batch = {"input_ids": ids, "labels": ids}
    pipe = autopart.compile(
        gpt2(), "cpu:2", sample=batch, micro_batches=MICROS, schedule=schedule, cuts=(cut,), costs="analytic"
    )
    optimizer = adamw(pipe.parameters())

    def step() -> None:
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step, pipe


def peer(schedule: Any, ids: torch.Tensor, cut: str) -> Callable[[], None]:
    rank = dist.get_rank()
    split = {f"model.{cut}": SplitPoint.BEGINNING}
    pipe = pipeline(Logits(gpt2()), mb_args=(ids[: BATCH // MICROS],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    runner = schedule(stage, MICROS, loss_fn=next_token_loss)
    optimizer = adamw(stage.submod.parameters())

    def step() -> None:
        runner.step(ids) if rank == 0 else runner.step(target=ids, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rounds: int, warmup: int, cut: str) -> dict[str, Any]:
    """One rank: every variant once per round; seconds by variant, and the stage times of ours."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    steps: dict[str, Callable[[], None]] = {}
    pipes = {}
    for name, schedule in OURS.items():
        steps[name], pipes[name] = ours(schedule, ids, cut)
    for name, schedule in PEER.items():
        steps[name] = peer(schedule, ids, cut)
    alone = one_process(ids)
    steps["one process"] = alone if dist.get_rank() == 0 else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "allowed": {name: allowed(pipe, steps[name]) for name, pipe in pipes.items()}}


def allowed(pipe: autopart.Pipe, step: Callable[[], None], runs: int = 7) -> dict[str, Any]:
    """What the stage times of some traced steps allow, and what those steps took, in seconds."""
    spans, took, tails = [], [], []
    for _ in range(runs):
        dist.barrier()
        began = time.perf_counter()
        with pipe.traced() as trace:
            step()
        ended = time.perf_counter()
        dist.barrier()
        took.append(time.perf_counter() - began)
        tails.append(ended - began - trace.timeline.step_ns * 1e-9)
        spans += trace.spans
    mine = [statistics.median(s.end_ns - s.start_ns for s in spans if s.action.kind == kind) for kind in ("F", "B")]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (*mine, statistics.median(tails)))
    free = replace(pipe.cluster, levels=(autopart.Level(pipe.cluster.world, autopart.Link(0, 10**18)),))
    nothing = {(edge.src, edge.dst, "F"): 0 for edge in pipe.program.edges}
    ideal = simulate(
        pipe.program, fwd_ns=tuple(int(x[0]) for x in every), bwd_ns=tuple(int(x[1]) for x in every), cluster=free,
        message_bytes=nothing | {(b, a, "B"): 0 for a, b, _ in nothing}, activation_bytes=(0,) * len(every),
    )  # fmt: skip
    return {
        "stage_ms": [[x[0] / 1e6, x[1] / 1e6] for x in every],
        "ideal_s": ideal.step_ns * 1e-9,
        "optimizer_s": max(x[2] for x in every),
        "took_s": statistics.median(took),
    }


def report(seconds: dict[str, list[float]], limits: dict[str, Any], cut: str) -> None:
    print(f"\nGPT-2 {LAYERS} layers, hidden {HIDDEN}, cut at {cut}; {MICROS} micro-batches, 2 ranks x 1 thread")
    for name, values in seconds.items():
        print(f"  {name:16s} {spread(values)}")
    ratios = {
        f"{theirs} / {mine}": ratio(seconds[theirs], seconds[mine]) for theirs, mine in zip(PEER, OURS, strict=True)
    }
    ratios |= {f"one process / {mine}": ratio(seconds["one process"], seconds[mine]) for mine in OURS}
    for name, value in ratios.items():
        print(f"  {name:30s} {value.median:.3f}x  [{value.low:.3f}, {value.high:.3f}]")
    reached = {}
    for name, limit in limits.items():
        share = (limit["ideal_s"] + limit["optimizer_s"]) / statistics.median(seconds[name])
        reached[name] = share
        print(f"  {name:16s} reaches {share:.1%} of what its stage times allow ({limit['ideal_s']:.4f} s + optimizer)")
    content = {"seconds": {k: spread(v) for k, v in seconds.items()}, "ratios": ratios, "allowed": limits}
    print("written to", write("step_time", {**content, "share_of_allowed": reached}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--cut", default="transformer.h.4", help="module path at which the second stage begins")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = autopart.launch(measure, "cpu:2", given.rounds, given.warmup, given.cut)
    report(results[0]["seconds"], results[0]["allowed"], given.cut)


if __name__ == "__main__":
    main()
