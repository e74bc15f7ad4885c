"""Plans with tensor parallelism beside those of experts, in one simulator: GPT-3 175B and Llama-3.1 405B.

Experts' plans in the words of `autopart plan --hand`: GPT-3 on 384 A100 in groups of 8, 12 stages, two of them a rank
(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, table 1),
with micro-batches of 1 and 2 rows; 405B in groups of 8 and 16 stages (Grattafiori et al., "The Llama 3 Herd of
Models", 2024, table 4, which is for 8,192 and 16,384 devices), here on 1,024 and 4,096 H200.  What they recompute is
left to the planner.  GPT-3 is planned without dropout: the kernel of attention draws for all heads at once.

Claims: simulated steps with `tensor_parallel="auto"` of at most 62, 100 and 30 s, none longer than an expert's;
planning takes at most twice the processor time that `plan_speed` records without tensor parallelism, and 2 GB.

    python -m benchmarks.papers.experts              writes results/experts.json
    python -m benchmarks.papers.experts --only 4096  only matching names; other recorded results are kept
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import autopart
from autopart.extras.export.hand import hand_options
from benchmarks.planning import plan_speed
from benchmarks.planning.plan_speed import Case
from benchmarks.shared import shapes
from benchmarks.shared.common import recorded, write

GROUPS = {"tensor_parallel": "auto"}


@dataclass(frozen=True)
class Expert:
    """A case with plans of experts.  hands: in the words of `--hand`.  step_s: most that the simulated step may take.
    like: the case of `plan_speed` without tensor parallelism."""

    case: Case
    hands: tuple[str, ...]
    step_s: float
    like: str


def _llama(name: str, nodes: int, hands: tuple[str, ...], step_s: float) -> Expert:
    case = Case(name, shapes.llama_405b, 2048, 8192, f"h200x8:{nodes}", optimizer="adamw", asked=GROUPS)
    return Expert(case, hands, step_s, name)


EXPERTS = (
    Expert(
        Case(
            "gpt3-175b",
            lambda: shapes.gpt2(96, 12288, 96, 2048, dropout=0.0),
            1536,
            2048,
            "a100x8:48",
            asked=GROUPS,
        ),
        ("tp=8,pp=12,dp=4,vpp=2,mbs=1", "tp=8,pp=12,dp=4,vpp=2,mbs=2"),
        62,
        "gpt3-175b",
    ),
    _llama("llama-405b", 128, ("tp=8,pp=16,dp=8,mbs=1",), 100),
    _llama("llama-405b on 4096", 512, ("tp=8,pp=16,dp=32,mbs=1",), 30),
)


def by_hand(case: Case, text: str) -> dict[str, Any]:
    """Return the simulated step of an expert's plan."""
    with torch.device("meta"):
        model, given = case.make().bfloat16(), shapes.causal_batch(case.rows, case.length)
    asked = {"optimizer": case.optimizer, "cache": False, **hand_options(text, model, case.rows)}
    plan = autopart.plan(model, case.cluster, sample=given, **asked)
    return {"step_ms": plan.step_ns / 1e6, "peak_gb": max(e.peak_bytes for e in plan.estimates) / 1e9}


def judged(done: Mapping[str, Any]) -> dict[str, bool]:
    """Return the claims about the results so far, and whether they hold."""
    claims, without = dict[str, bool](), recorded("plan_speed", "targets")
    for expert in (expert for expert in EXPERTS if expert.case.name in done):
        name, found = expert.case.name, done[expert.case.name]
        step_s, most_s = found["step_ms"] / 1e3, 2 * without.get(expert.like, {}).get("seconds", 0.0)
        claims[f"{name}: step {step_s:.1f} s <= {expert.step_s:g}"] = step_s <= expert.step_s
        for text, hand in found["by_hand"].items():
            by_hand_s = hand.get("step_ms", float("inf")) / 1e3
            claims[f"{name}: step {step_s:.1f} s <= {by_hand_s:.1f} of {text}"] = step_s <= by_hand_s
        claims[f"{name}: planned in {found['seconds']:.0f} s <= {most_s:.0f}"] = found["seconds"] <= most_s
        claims[f"{name}: {found['planned_rss_gb']:.2f} GB <= 2"] = found["planned_rss_gb"] <= 2
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names; other recorded results are kept")
    given = parser.parse_args()
    shapes.warm()
    done = recorded("experts", "plans")
    for expert in (expert for expert in EXPERTS if re.search(given.only, expert.case.name)):
        case = expert.case
        found = shapes.alone(lambda case=case: plan_speed.result(case))  # type: ignore[misc]
        print(plan_speed.line(case.name, found), flush=True)
        hands = {text: shapes.alone(lambda case=case, text=text: by_hand(case, text)) for text in expert.hands}  # type: ignore[misc]
        for text, hand in hands.items():
            print(f"    {text}: {hand.get('failed') or hand['step_ms']}", flush=True)
        done[case.name] = {**found, "by_hand": hands}
        done = {each.case.name: done[each.case.name] for each in EXPERTS if each.case.name in done}
        write("experts", {"claims": judged(done), "plans": done})
    for claim, holds in judged(done).items():
        print("holds " if holds else "FAILS ", claim)


if __name__ == "__main__":
    main()
