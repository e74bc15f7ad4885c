"""Step time compared with torch.distributed.pipelining, and with the limit set by the stage times.

GPT-2, 8 layers, hidden 256, vocabulary 1024, sequence 128, batch 8, 8 micro-batches, fp32, dropout off, fused AdamW in
the step; 2 Gloo ranks with 1 thread each. autopart 1F1B, also compiled, and GPipe, torch's 1F1B and GPipe with the same
cut, and one process with one thread alternate in one run; ratios are taken pair by pair.

"Allowed": for each measured step, the simulator runs the same program with the mean forward and backward times that
the stages had in that step and with free messages. The share reached is that time, plus the optimizer's, over the
measured step.

    python -m benchmarks.steps.step_time            about 2 minutes on 2 cores; writes results/step_time.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import autopart
from autopart.ir.timeline import Span, Timeline
from autopart.passes.simulation.simulate import Work, step_ns
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import training_step
from benchmarks.shared.common import ratio, spread, write
from benchmarks.shared.torch_pipeline import torch_pipeline

LAYERS, HIDDEN, VOCAB, SEQ, BATCH, MICROS = 8, 256, 1024, 128, 8, 8
PEER = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
OURS: dict[str, dict[str, Any]] = {
    "autopart 1F1B": {"schedule": "1f1b"},
    "autopart GPipe": {"schedule": "gpipe"},
    "autopart 1F1B, compiled": {"schedule": "1f1b", "backend": "inductor"},
}
PAIRS = {"autopart 1F1B": "torch 1F1B", "autopart GPipe": "torch GPipe", "autopart 1F1B, compiled": "torch 1F1B"}


def gpt2(use_cache: bool = True) -> torch.nn.Module:
    """Return the model. use_cache: the default of transformers; torch's pipeline does not accept a cache in the
    outputs.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
        use_cache=use_cache,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def one_process(ids: torch.Tensor) -> Callable[[], None]:
    model = gpt2()
    return training_step(lambda: model(input_ids=ids, labels=ids).loss.backward(), model.parameters())


def ours(options: dict[str, Any], ids: torch.Tensor, cut: str) -> tuple[Callable[[], Any], autopart.Pipe]:
    batch = {"input_ids": ids, "labels": ids}
    pipe = autopart.compile(
        gpt2(), "cpu:2", sample=batch, micro_batches=MICROS, cuts=(cut,), costs="analytic", **options
    )
    return training_step(partial(pipe.step, batch), pipe.parameters()), pipe


def peer(schedule: Any, ids: torch.Tensor, cut: str) -> Callable[[], Any]:
    compute, parameters = torch_pipeline(
        gpt2(use_cache=False), "input_ids", ids, ids, next_token_loss, cuts=(cut,), micros=MICROS, schedule=schedule
    )
    return training_step(compute, parameters)


def measure(rounds: int, warmup: int, cut: str) -> dict[str, Any]:
    """Run every variant once per round on one rank; return seconds by variant and the share of the allowed time."""
    torch.set_num_threads(1)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    steps: dict[str, Callable[[], Any]] = {}
    pipes: dict[str, autopart.Pipe] = {}
    for name, options in OURS.items():
        steps[name], pipes[name] = ours(options, ids, cut)
    for name, schedule in PEER.items():
        steps[name] = peer(schedule, ids, cut)
    alone = one_process(ids)
    steps["one process"] = alone if dist.get_rank() == 0 else lambda: None
    measured = alternate({name: partial(traced, step, pipes.get(name)) for name, step in steps.items()}, rounds, warmup)
    limits = {n: allowed(pipe, measured.results[n], measured.seconds[n]) for n, pipe in pipes.items()}
    return {"seconds": measured.seconds, "allowed": limits}


def traced(step: Callable[[], Any], pipe: autopart.Pipe | None) -> Any:
    """Run a step and return its `stage_times` if a pipe ran it."""
    began = time.perf_counter()
    with pipe.traced() if pipe is not None else contextlib.nullcontext() as spans:
        step()
    return None if spans is None else stage_times(spans, time.perf_counter() - began)


def stage_times(spans: list[Span], seconds: float) -> tuple[int, int, int]:
    """Return nanoseconds of a mean forward, of a mean backward, and of what this rank did outside its actions."""
    spent = {kind: [s.end_ns - s.start_ns for s in spans if s.action.kind == kind] for kind in "FB"}
    outside = int(seconds * 1e9) - Timeline(tuple(spans)).step_ns
    return int(statistics.mean(spent["F"])), int(statistics.mean(spent["B"])), outside


def allowed(pipe: autopart.Pipe, parts: list[tuple[int, int, int]], seconds: list[float]) -> dict[str, Any]:
    """Return for each step the allowed seconds and their share of the measured step."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, parts)
    ideals = []
    for step in zip(*ranks, strict=True):
        forward, backward, outside = zip(*step, strict=True)
        ideal = step_ns(pipe.program, Work(forward, backward, (0,) * len(step), {}))  # messages are free
        ideals.append((ideal + min(outside)) * 1e-9)
    return {"ideal": ideals, "share": [ideal / took for ideal, took in zip(ideals, seconds, strict=True)]}


def report(seconds: dict[str, list[float]], limits: dict[str, Any], cut: str) -> None:
    print(f"\nGPT-2 {LAYERS} layers, hidden {HIDDEN}, cut at {cut}; {MICROS} micro-batches, 2 ranks x 1 thread")
    for name, values in seconds.items():
        print(f"  {name:24s} {spread(values)}")
    ratios = {f"{other} / {mine}": ratio(seconds[other], seconds[mine]) for mine, other in PAIRS.items()}
    ratios |= {f"one process / {mine}": ratio(seconds["one process"], seconds[mine]) for mine in OURS}
    for name, value in ratios.items():
        print(f"  {name:38s} {value.median:.3f}x  [{value.low:.3f}, {value.high:.3f}]")
    shares = {name: spread(limit["share"]) for name, limit in limits.items()}
    for name, share in shares.items():
        ideal = statistics.median(limits[name]["ideal"])
        limits_text = f"[{share.low:.1%}, {share.high:.1%}]  ({ideal:.4f} s)"
        print(f"  {name:24s} reaches {share.median:.1%} of what its stage times allow  {limits_text}")
    allowed_s = {name: spread(limit["ideal"]) for name, limit in limits.items()}
    content = {"seconds": {k: spread(v) for k, v in seconds.items()}, "ratios": ratios, "allowed_seconds": allowed_s}
    print("written to", write("step_time", {**content, "share_of_allowed": shares}).name)


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
