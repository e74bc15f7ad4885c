"""Planning as ranks grow: seconds, and bytes of the plan file and of the program, from 1,024 ranks to 100,000.

GPT-2's shape with 24 layers of 1,024, sequences of 128 tokens and 8 of them for each rank, on the meta device, on nodes
of eight H100. One process does everything: the plan, for which the search simulates steps, its file written and read,
the program, and the proof that it runs. Then a mixture of experts of 10^12 parameters on 16,384 H200 (Qwen3-MoE's
shape), which has to be planned within 120 s and 3 GB, or refused with what is missing by name. Seconds are processor
time.

    python -m benchmarks.planning.ranks                    all; writes results/ranks.json
    python -m benchmarks.planning.ranks --only 1024        only matching cases; other recorded results are kept
    python -m benchmarks.planning.ranks --table            prints what is recorded as the table of docs/planner.md
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.files.clusters import parse_cluster
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.errors import AutopartError
from autopart.options import read_options
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.planning.make import make_plan
from benchmarks.shared import shapes
from benchmarks.shared.common import recorded, write

RANKS = (1024, 16_384, 100_000)
SECONDS, GB = 120.0, 3.0
"""Limits of the mixture."""


def mixture() -> torch.nn.Module:
    """Return a mixture of 10^12 parameters, of which a token uses 3 %."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=88,
        num_attention_heads=56, num_key_value_heads=8, head_dim=128, num_experts=256, num_experts_per_tok=8,
        max_position_embeddings=8192, use_cache=False, output_router_logits=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).train()


def result(make: Callable[[], torch.nn.Module], rows: int, length: int, cluster: str) -> dict[str, Any]:
    """Return the seconds of each step, the bytes of what is written, and the plan; or the refusal."""
    with torch.device("meta"):
        model, given = make().bfloat16(), shapes.causal_batch(rows, length)
    options = read_options(optimizer="adamw", cache=False)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        try:
            return work()
        finally:
            seconds[name] = time.process_time() - began

    known = {"parameters_b": shapes.parameters(model) / 1e9, "seconds": seconds}
    machines, captures = parse_cluster(cluster), CaptureCache(model)
    try:
        planned = timed("plan", lambda: make_plan(captures, flatten(given), machines, options, to_run=False))
    except AutopartError as refusal:
        return {**known, "refused": str(refusal)}
    plan = planned.plan
    text = timed("write", lambda: plan_to_json(plan))
    timed("read", lambda: plan_from_json(text))
    program = timed("program", lambda: route(plan.decision, planned.captured.graph))
    timed("proof", lambda: check_program(program, plan.schedule))
    return {
        **known,
        "ranks": machines.world,
        "stages": len(plan.stages),
        "replicas": len(plan.stages[0].ranks),
        "micro_batches": len(plan.micro_rows),
        "step_ms": plan.step_ns / 1e6,
        "gap": plan.outlook.optimality.gap if plan.outlook.optimality else None,
        "plan_bytes": len(text),
        "actions": len(program.order),
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Return one result as a line."""
    if "failed" in found or "refused" in found:
        return f"{name}: {found.get('failed') or found['refused']} ({found.get('rss_gb', 0):.2f} GB)"
    steps = "  ".join(f"{step} {taken:.2f} s" for step, taken in found["seconds"].items())
    return (
        f"{name}: {found['stages']} stages of {found['replicas']}, {found['micro_batches']} micro-batches;  {steps};  "
        f"file {found['plan_bytes'] / 1e6:.2f} MB, {found['actions']} actions, {found['rss_gb']:.2f} GB"
    )


def table(done: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    head = "stages x replicas", "plan s", "write, read s", "program, proof s", "plan file MB", "actions", "memory GB"
    rows = [("", *head), ("---", *(["---"] * len(head)))]
    for name, found in done.items():
        if "failed" in found or "refused" in found:
            rows.append((name, found.get("failed") or found["refused"], *([""] * (len(head) - 1))))
            continue
        seconds = found["seconds"]
        rows.append((
            name, f"{found['stages']} x {found['replicas']}", f"{seconds['plan']:.0f}",
            f"{seconds['write'] + seconds['read']:.2f}", f"{seconds['program'] + seconds['proof']:.2f}",
            f"{found['plan_bytes'] / 1e6:.2f}", f"{found['actions']:,}", f"{found['rss_gb']:.2f}",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def claims_of(done: dict[str, Any]) -> dict[str, bool]:
    """Return what is claimed, and whether it holds."""
    found = done.get("mixture", {})
    taken = found.get("seconds", {}).get("plan", float("inf"))
    held = found.get("rss_gb", float("inf"))
    claim = f"a mixture of 10^12 parameters on 16,384 devices is planned or refused in {taken:.0f} s and {held:.1f} GB"
    return {claim: taken <= SECONDS and held <= GB} if found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--table", action="store_true", help="print what is recorded, and measure nothing")
    given = parser.parse_args()
    if given.table:
        print(table(recorded("ranks", "cases")))
        return
    shapes.warm()
    gpt2 = partial(shapes.gpt2, 24, 1024, 16, 128)
    cases = {f"{ranks} ranks": partial(result, gpt2, 8 * ranks, 128, f"h100x8:{ranks // 8}") for ranks in RANKS}
    cases["mixture"] = partial(result, mixture, 16_384, 4096, "h200x8:2048")
    for name, work in cases.items():
        if re.search(given.only, name):
            found = shapes.alone(work)
            print(line(name, found), flush=True)
            known = {**recorded("ranks", "cases"), name: found}  # another process may have recorded cases meanwhile
            done = {each: known[each] for each in cases if each in known}
            write("ranks", {"claims": claims_of(done), "cases": done})
    done = recorded("ranks", "cases")
    for claim, holds in claims_of(done).items():
        print("met   " if holds else "MISSED", claim)


if __name__ == "__main__":
    main()
