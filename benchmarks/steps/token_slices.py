"""The gain of token slices in a pipeline of one sequence, and the planner's choice of slices.

Llama and GPT-2 shapes: 8 layers, hidden 256, vocabulary 2048, one sequence of 1024 or 2048 tokens, fp32, dropout off,
fused AdamW in the step; 2 stages on 2 Gloo ranks with 1 thread each, cut as the planner chooses for each, costs
measured. Whole sequences, the planner's lengths, and uniform slices of several counts alternate in one run; ratios are
taken pair by pair. Without slices one stage waits for the other, so two stages can gain 2x at most.

"Allowed": each rank's computations of a step, with the times they took in that step, in the program's order and with
free messages. The share reached is that time, plus the optimizer's, over the step.

Then 16 sequences in 16 micro-batches, which fill the pipeline without slices. Slices may still be faster, because they
do not compute what the mask hides: the planner must decide correctly for short and for long sequences.

    python -m benchmarks.steps.token_slices         about 15 minutes on 2 cores; writes results/token_slices.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers as hf

import autopart
from autopart.ir.actions import BACKWARD, COMPUTE, FORWARD, Slot
from autopart.ir.program import Program
from autopart.ir.timeline import Span, Timeline
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import BenchModel, adamw, tokens
from benchmarks.shared.common import ratio, spread, write

LAYERS, HIDDEN, VOCAB, STAGES = 8, 256, 2048, 2
SEQS = (1024, 2048)
WHOLE, PLANNED = "whole sequence", "planned slices"
UNIFORM = (2, 3, 4, 6, 8, 12, 16)
MANY = 16
"""A number of micro-batches that fills the pipeline without slices."""
SHORT, LONG = 256, 1024
"""Tokens of these sequences: attention is a small and a large part of their time."""
GAIN, NEAR = 1.6, 0.05
"""Least gain over whole sequences, and largest excess over the best uniform count."""


def _llama(seq: int) -> torch.nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=seq, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def _gpt2(seq: int) -> torch.nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=seq, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


MODELS = {"llama": (_llama, "model.layers"), "gpt2": (_gpt2, "transformer.h")}


def trained(name: str, seq: int, rows: int = 1) -> BenchModel:
    build, layers = MODELS[name]
    return BenchModel(partial(build, seq), tokens(VOCAB, rows, seq), layers, LAYERS)


def variants(counts: Sequence[int]) -> dict[str, Any]:
    """Return the variants by name with their token_slices=."""
    return {WHOLE: None, PLANNED: "auto", **{f"{count} uniform slices": count for count in counts}}


def compiled(model: BenchModel, micros: int, slices: Any) -> autopart.Pipe:
    return autopart.compile(
        model.model(), "cpu:2", sample=model.batch(), stages=STAGES, replicas=1, micro_batches=micros, recompute="off",
        token_slices=slices, costs="measured",
    )  # fmt: skip


def measure(name: str, seq: int, micros: int, rounds: int, warmup: int, counts: Sequence[int]) -> dict[str, Any]:
    """Run every variant once per round on one rank, with micro-batches of one sequence.

    Return the seconds, the allowed seconds and the slice lengths by variant.
    """
    torch.set_num_threads(1)
    model = trained(name, seq, micros)
    batch = model.batch()
    pipes = {label: compiled(model, micros, slices) for label, slices in variants(counts).items()}
    optimizers = {label: adamw(pipe.parameters()) for label, pipe in pipes.items()}
    measured = alternate(
        {label: partial(stepped, pipe, optimizers[label], batch) for label, pipe in pipes.items()}, rounds, warmup
    )
    ideals = {
        label: [allowed_seconds(pipe.program, each.spans, each.seconds) for each in measured.results[label]]
        for label, pipe in pipes.items()
    }
    apart = max(
        abs(each.loss / whole.loss - 1)
        for found in measured.results.values()
        for each, whole in zip(found, measured.results[WHOLE], strict=True)
    )
    lengths = {label: list(pipe.plan.decision.token_slices) for label, pipe in pipes.items()}
    expected = {label: pipe.plan.step_ns * 1e-9 for label, pipe in pipes.items()}
    return {
        "seconds": measured.seconds,
        "ideal": ideals,
        "lengths": lengths,
        "simulated": expected,
        "losses_apart": apart,
    }


@dataclass(frozen=True)
class Step:
    """What a rank measured in a step. seconds: without waiting for other ranks afterwards."""

    loss: float
    spans: list[Span]
    seconds: float


def stepped(pipe: autopart.Pipe, optimizer: torch.optim.Optimizer, batch: Any) -> Step:
    """Run a step and its optimizer step."""
    began = time.perf_counter()
    with pipe.traced() as spans:
        loss = pipe.step(batch).item()
    optimizer.step()
    optimizer.zero_grad()
    return Step(loss, spans, time.perf_counter() - began)


def allowed_seconds(program: Program, spans: list[Span], own_seconds: float) -> float:
    """Return the allowed seconds of a step on all ranks.

    Each computation takes its measured time and starts after those it needs; the least time that a rank spent outside
    its actions is added. Collective.
    """
    outside = own_seconds - Timeline(tuple(spans)).step_ns * 1e-9
    mine = [(str(s.action), s.end_ns - s.start_ns) for s in spans if s.action.is_a.role == COMPUTE]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (mine, outside))
    took = {action: ns for own, _ in ranks for action, ns in own}
    done: dict[tuple[str, Slot], int] = {}
    clocks = [0] * len(program.stage_ranks)
    for action in program.order:
        way, slot = action.is_a.way, action.slot
        if action.is_a.role == COMPUTE:
            before = slot.stage - 1 if way == FORWARD else slot.stage + 1
            # A part of a backward that goes no way, W, needs its own stage alone, in whose order it stands.
            ready = done.get((way, slot.on(before)), 0) if way in (FORWARD, BACKWARD) else 0
            clocks[slot.stage] = done[way, slot] = max(clocks[slot.stage], ready) + took[str(action)]
    assert {FORWARD, BACKWARD} <= {way for way, _ in done}
    return max(clocks) * 1e-9 + min(rest for _, rest in ranks)


def report(title: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print the results and return what is recorded."""
    seconds = found["seconds"]
    print(f"\n{title}: {LAYERS} layers, hidden {HIDDEN}; {STAGES} stages, 2 ranks x 1 thread")
    rows = {}
    for label, values in seconds.items():
        gain = ratio(seconds[WHOLE], values)
        share = spread([ideal / took for ideal, took in zip(found["ideal"][label], values, strict=True)])
        rows[label] = {
            "lengths": found["lengths"][label], "seconds": spread(values), "gain": gain, "share_of_allowed": share,
            "simulated_seconds": found["simulated"][label],
        }  # fmt: skip
        print(
            f"  {label:20s} {spread(values)}  gain {gain.median:.3f}x [{gain.low:.3f}, {gain.high:.3f}], "
            f"{share.median:.0%} of the allowed speed"
        )
    print(f"  planned: {rows[PLANNED]['lengths'] or WHOLE}")
    print(f"  difference of losses between variants {found['losses_apart']:.1e}")
    return {"rows": rows, "losses_apart": found["losses_apart"]} | _beside_uniform(rows, seconds)


def _beside_uniform(rows: dict[str, Any], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the planned slices with the best number of uniform ones, if any were measured."""
    uniform = [label for label in seconds if label not in (WHOLE, PLANNED)]
    if not uniform:
        return {}
    best = min(uniform, key=lambda label: rows[label]["seconds"].median)
    near = ratio(seconds[PLANNED], seconds[best])
    print(f"  planned against {best}: {near.median:.3f}x  [{near.low:.3f}, {near.high:.3f}]")
    return {"best_uniform": best, "planned_over_best": near}


def claims_of(one: dict[str, Any], many: dict[int, dict[str, Any]]) -> dict[str, bool]:
    """Return the claims and whether they hold. one: reports of one sequence; many: of many micro-batches, by tokens and
    model.
    """

    def gains(found: dict[str, Any]) -> float:
        return float(found["rows"][PLANNED]["gain"].median)

    return {
        f"planned slices gain at least {GAIN}x": all(gains(found) >= GAIN for found in one.values()),
        f"planned slices within {NEAR:.0%} of the best uniform count": all(
            found["planned_over_best"].median <= 1 + NEAR for found in one.values()
        ),
        f"{MANY} micro-batches of {SHORT} tokens are not sliced": not any(
            found["rows"][PLANNED]["lengths"] for found in many[SHORT].values()
        ),
        f"{MANY} micro-batches of {LONG} tokens are sliced only where that is faster": all(
            gains(found) >= 1 or not found["rows"][PLANNED]["lengths"] for found in many[LONG].values()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--counts", type=int, nargs="+", default=list(UNIFORM))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seqs", type=int, nargs="+", default=list(SEQS))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    def run(name: str, seq: int, micros: int, rounds: int, counts: Sequence[int]) -> dict[str, Any]:
        found = autopart.launch(measure, "cpu:2", name, seq, micros, rounds, given.warmup, counts)
        return report(f"{name}, {micros} x {seq} tokens", found[0])

    one = {
        f"{name}, {seq}": run(name, seq, 1, given.rounds, given.counts)
        for name, seq in product(given.models, given.seqs)
    }
    few = max(3, given.rounds // 3)
    many = {seq: {name: run(name, seq, MANY, few, ()) for name in given.models} for seq in (SHORT, LONG)}
    claims = claims_of(one, many)
    for claim, held in claims.items():
        print(f"{'yes' if held else 'NO '}  {claim}")
    found = {"one sequence": one, f"{MANY} micro-batches": many, "claims": claims}
    print("written to", write("token_slices", found).name)


if __name__ == "__main__":
    main()
