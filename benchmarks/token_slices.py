"""Does a pipeline of one sequence gain from slices of its tokens, and does the planner choose them well?

Llama and GPT-2 shapes: 8 layers, hidden 256, vocabulary 2048, one sequence of 1024 tokens, fp32, dropout off, fused
AdamW in the step; 2 stages on 2 Gloo ranks with 1 thread each, costs measured.  Whole sequences, the lengths that the
dynamic program chose, and uniform slices of several counts take turns in one run; ratios are taken pair by pair.
Without slices one stage waits for the other, so two stages can gain 2x at most.

"Allowed": each rank's computes of a step, as long as they took in that very step, in the program's order and with
messages that cost nothing; the share reached is that time, plus the optimizer's, over the step.

Then the planner alone is asked about 16 sequences in 16 micro-batches, where it should not slice.

    python benchmarks/token_slices.py         about 6 minutes on 2 cores; writes results/token_slices.json
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers as hf
from common import ratio, spread, write
from trained import Trained, adamw, tokens

import autopart
from autopart.ir.program import BACKWARD, COMPUTE, FORWARD, Program, Slot

LAYERS, HIDDEN, VOCAB, SEQ, STAGES = 8, 256, 2048, 1024, 2
WHOLE, PLANNED = "whole sequence", "planned slices"
UNIFORM = (2, 3, 4, 6, 8, 12, 16)
GAIN, NEAR = 1.6, 0.05
"""Over whole sequences, at least; above the best uniform count, at most."""


def _llama() -> torch.nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def _gpt2() -> torch.nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


MODELS = {
    "llama": Trained(_llama, tokens(VOCAB, 1, SEQ), "model.layers", LAYERS),
    "gpt2": Trained(_gpt2, tokens(VOCAB, 1, SEQ), "transformer.h", LAYERS),
}


def variants(counts: Sequence[int]) -> dict[str, Any]:
    """Name and token_slices= of what takes turns."""
    return {WHOLE: None, PLANNED: "auto", **{f"{count} uniform slices": count for count in counts}}


def compiled(model: Trained, slices: Any, cut: int) -> autopart.Pipe:
    return autopart.compile(
        model.model(), "cpu:2", sample=model.batch(), stages=STAGES, replicas=1, micro_batches=1, recompute="off",
        cuts=(f"{model.layers}.{cut}",), token_slices=slices, costs="measured",
    )  # fmt: skip


def measure(name: str, rounds: int, warmup: int, cut: int, counts: Sequence[int]) -> dict[str, Any]:
    """One rank: every variant once per round; seconds, what the computes allow and the lengths, by variant."""
    torch.set_num_threads(1)
    model = MODELS[name]
    batch = model.batch()
    pipes = {label: compiled(model, slices, cut) for label, slices in variants(counts).items()}
    optimizers = {label: adamw(pipe.parameters()) for label, pipe in pipes.items()}
    seconds: dict[str, list[float]] = {label: [] for label in pipes}
    ideals: dict[str, list[float]] = {label: [] for label in pipes}
    losses: dict[str, float] = {}
    for number in range(warmup + rounds):
        for label, pipe in pipes.items():
            dist.barrier()
            began = time.perf_counter()
            with pipe.traced() as trace:
                losses[label] = pipe.step(batch).item()
            optimizers[label].step()
            optimizers[label].zero_grad()
            own = time.perf_counter() - began
            dist.barrier()
            if number >= warmup:
                seconds[label].append(time.perf_counter() - began)
                ideals[label].append(allowed_seconds(pipe.program, trace, own))
    apart = max(abs(loss / losses[WHOLE] - 1) for loss in losses.values())
    lengths = {label: list(pipe.plan.decision.token_slices) for label, pipe in pipes.items()}
    expected = {label: pipe.plan.step_ns * 1e-9 for label, pipe in pipes.items()}
    return {"seconds": seconds, "ideal": ideals, "lengths": lengths, "simulated": expected, "losses_apart": apart}


def allowed_seconds(program: Program, trace: Any, own_seconds: float) -> float:
    """Of a step on all ranks: the computes as long as they took, each after those that it needs; and the least that a
    rank did outside its actions.  Collective."""
    outside = own_seconds - trace.timeline.step_ns * 1e-9
    mine = [(str(s.action), s.end_ns - s.start_ns) for s in trace.spans if s.action.is_a.role == COMPUTE]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (mine, outside))
    took = {action: ns for spans, _ in ranks for action, ns in spans}
    done: dict[tuple[str, Slot], int] = {}
    clocks = [0] * len(program.stage_ranks)
    for action in program.order:
        way, slot = action.is_a.way, action.slot
        if action.is_a.role == COMPUTE:
            before = slot.stage - 1 if way == FORWARD else slot.stage + 1
            ready = done.get((way, slot.on(before)), 0)
            clocks[slot.stage] = done[way, slot] = max(clocks[slot.stage], ready) + took[str(action)]
    assert {way for way, _ in done} == {FORWARD, BACKWARD}
    return max(clocks) * 1e-9 + min(rest for _, rest in ranks)


def report(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print it; what is kept of it."""
    seconds = found["seconds"]
    print(f"\n{name}: {LAYERS} layers, hidden {HIDDEN}, 1 x {SEQ} tokens; {STAGES} stages, 2 ranks x 1 thread")
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
            f"{share.median:.0%} of what its computes allow"
        )
    best = min((label for label in seconds if label not in (WHOLE, PLANNED)), key=lambda n: rows[n]["seconds"].median)
    near = ratio(seconds[PLANNED], seconds[best])
    print(
        f"  planned: {rows[PLANNED]['lengths']}; against {best}: {near.median:.3f}x  [{near.low:.3f}, {near.high:.3f}]"
    )
    print(f"  losses of the variants apart by {found['losses_apart']:.1e}")
    return {"rows": rows, "best_uniform": best, "planned_over_best": near, "losses_apart": found["losses_apart"]}


def many_micro_batches() -> dict[str, list[int]]:
    """The lengths that the planner chooses where 16 micro-batches fill the pipeline already."""
    chosen = {}
    for name, model in MODELS.items():
        plan = autopart.plan(
            model.model(), "cpu:2", sample=tokens(VOCAB, 16, SEQ)(), stages=STAGES, replicas=1, micro_batches=16,
            token_slices="auto", costs="measured",
        )  # fmt: skip
        chosen[name] = list(plan.decision.token_slices)
        print(f"{name}, 16 micro-batches: {chosen[name] or 'whole sequences'}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cut", type=int, default=4, help="layer at which the second stage begins")
    parser.add_argument("--counts", type=int, nargs="+", default=list(UNIFORM))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    models = {}
    for name in given.models:
        found = autopart.launch(measure, "cpu:2", name, given.rounds, given.warmup, given.cut, given.counts)
        models[name] = report(name, found[0])
    chosen = many_micro_batches()
    claims = {
        f"planned slices gain at least {GAIN}x": all(
            found["rows"][PLANNED]["gain"].median >= GAIN for found in models.values()
        ),
        f"planned slices within {NEAR:.0%} of the best uniform count": all(
            found["planned_over_best"].median <= 1 + NEAR for found in models.values()
        ),
        "16 micro-batches are not sliced": not any(chosen.values()),
    }
    for claim, held in claims.items():
        print(f"{'yes' if held else 'NO '}  {claim}")
    print("written to", write("token_slices", {"models": models, "16 micro-batches": chosen, "claims": claims}).name)


if __name__ == "__main__":
    main()
