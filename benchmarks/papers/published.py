"""Plans for RaNNC's published configurations: at least as good, in seconds instead of hours.

The configurations of RaNNC (Tanaka et al., "Automatic Graph Partitioning for Very Large-scale Deep Learning", IPDPS
2021, and the examples of its repository) on meta tensors, for 32 V100 of 32 GB in 4 nodes:

- BERT, hidden 1024, 1536 and 2048 times 24 to 256 layers, sequences of 512, batch 256, fp16 with fp32 master weights
  and Adam;
- ResNet-50, 101 and 152 with all filters times 1, 2, 4, 8; images of 224, batch 512, fp32, SGD with momentum.

Two plans are published with the times of their stages: BERT of 4.9 B parameters (S=4, 8 micro-batches, recomputation;
max/mean of forward + backward 1.025; planned in 4 hours) and ResNet152x8 (S=3, replicas 16/8/8, 4 micro-batches,
recomputation; 1.064; 3 hours). Their shape is also planned here, with autopart's cuts, and simulated. The published
log of BERT is for 8 devices and a batch of 64, with two replicas per stage; on 32 devices that is eight.

Claim: every configuration is planned and fits; a published plan is matched in balance or in simulated step time. All
times use analytic costs at peak rates: ratios are meaningful, milliseconds are not. ResNet's BatchNorm sees each
replica's share of a micro-batch, as in RaNNC.

    python -m benchmarks.papers.published                  all, smallest first; writes results/published.json
    python -m benchmarks.papers.published --only bert-1024 only matching names; other recorded results are kept
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional

import autopart
from autopart.files.clusters import parse_cluster
from benchmarks.shared import shapes
from benchmarks.shared.common import recorded, write

HIDDEN = {  # billions of parameters, by number of layers
    1024: {24: 0.34, 48: 0.64, 96: 1.24, 144: 1.85, 192: 2.45, 256: 3.26},
    1536: {24: 0.73, 48: 1.41, 96: 2.77, 144: 4.13, 192: 5.49, 256: 7.31},
    2048: {24: 1.28, 48: 2.49, 96: 4.91, 144: 7.32, 192: 9.74, 256: 12.96},
}
RESNETS = {  # billions of parameters, by factor
    50: {1: 0.0256, 2: 0.098, 4: 0.3836, 8: 1.517},
    101: {1: 0.0445, 2: 0.1739, 4: 0.6868, 8: 2.730},
    152: {1: 0.0602, 2: 0.2364, 4: 0.9366, 8: 3.729},
}
BERT_OPTIONS = {"optimizer": "adamw+masters", "loss_fn": shapes.bert_loss}
RESNET_OPTIONS = {"optimizer": "momentum", "loss_fn": functional.cross_entropy}


@dataclass(frozen=True)
class Case:
    """A configuration.

    make: builds model and batch on the current device; published_b: billions of parameters; imbalance: of the published
    plan, 0 for none; like: the case whose published plan this is.
    """

    name: str
    make: Callable[[], tuple[torch.nn.Module, Any]]
    published_b: float
    options: dict[str, Any]
    cluster: str = "v100x8:4"
    imbalance: float = 0.0
    like: str = ""
    shape: dict[str, Any] = field(default_factory=dict)


def _bert(hidden: int, layers: int, name: str = "", rows: int = 256, **more: Any) -> Case:
    def make() -> tuple[torch.nn.Module, Any]:
        return shapes.bert(hidden, layers).half(), shapes.bert_batch(rows)

    return Case(name or f"bert-{hidden}x{layers}", make, HIDDEN[hidden][layers], BERT_OPTIONS, **more)


def _resnet(depth: int, factor: int, name: str = "", **more: Any) -> Case:
    def make() -> tuple[torch.nn.Module, Any]:
        return shapes.ResNet(depth, factor).train(), shapes.image_batch(16 * 32)

    return Case(name or f"resnet{depth}x{factor}", make, RESNETS[depth][factor], RESNET_OPTIONS, **more)


def cases() -> list[Case]:
    """Return all cases, the slowest last."""
    published = {(2048, 96): 1.025, (152, 8): 1.064}
    berts = [_bert(h, n, imbalance=published.get((h, n), 0.0)) for n in HIDDEN[1024] for h in HIDDEN]
    resnets = [_resnet(d, f, imbalance=published.get((d, f), 0.0)) for d in RESNETS for f in RESNETS[d]]
    four = {"stages": 4, "micro_batches": 8, "recompute": "all"}
    three = {"stages": 3, "replicas": (16, 8, 8), "micro_batches": 4, "recompute": "all"}
    fixed = [
        _resnet(152, 8, "published: resnet152x8", like="resnet152x8", shape=three),
        _bert(2048, 96, "published: bert-2048x96", like="bert-2048x96", shape={**four, "replicas": 8}),
    ]
    small = {"rows": 64, "cluster": "v100x8"}
    eight = [
        _bert(2048, 96, "bert-2048x96 on 8", **small),
        _bert(
            2048, 96, "published: bert-2048x96 on 8", **small, like="bert-2048x96 on 8", shape={**four, "replicas": 2}
        ),
    ]
    half = len(berts) // 2
    return [*resnets, *berts[:half], *fixed, *eight, *berts[half:]]


def result(case: Case) -> dict[str, Any]:
    """Return the plan of one case, its time and memory."""
    with torch.device("meta"):
        model, batch = case.make()
    cluster = parse_cluster(case.cluster)
    began, cpu = time.perf_counter(), time.process_time()
    plan = autopart.plan(model, cluster, sample=batch, **case.options, **case.shape)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert plan.outlook.optimality
    works = [e.fwd_ns + e.bwd_ns for e in plan.estimates]
    again = sum(e.recompute_ns for e in plan.estimates) / sum(e.fwd_ns for e in plan.estimates)
    limit = cluster.devices[0].memory_bytes
    peak = max(e.peak_bytes for e in plan.estimates)
    return {
        "parameters_b": shapes.parameters(model) / 1e9,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "fits": peak <= limit,
        "peak_gb": [e.peak_bytes / 1e9 for e in plan.estimates],
        "limit_gb": limit / 1e9,
        "stages": len(plan.stages),
        "replicas": [len(stage.ranks) for stage in plan.stages],
        "micro_batches": len(plan.micro_rows),
        "rows": max(plan.micro_rows),
        "schedule": plan.schedule,
        "recomputed": again,
        "stage_ms": [work / 1e6 for work in works],
        "imbalance": max(works) * len(works) / sum(works),
        "step_ms": plan.step_ns / 1e6,
        "bubble": plan.outlook.bubble,
        "gap": plan.outlook.optimality.gap,
        "notes": [re.sub(r"/\S*/site-packages/", "", note) for note in plan.notes],  # not where this machine keeps them
    }


def row(case: Case, found: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "failed" in found:
        return f"{case.name:28s} {found['failed']}"
    return (
        f"{case.name:28s} {found['parameters_b']:6.3f} {case.published_b:6.3f} {found['seconds']:6.1f} "
        f"{found['cpu_seconds']:6.1f} {found['rss_gb']:5.2f} {max(found['peak_gb']):5.1f}/{found['limit_gb']:.0f} "
        f"{found['micro_batches']:4d}x{found['rows']:<4d} {found['recomputed']:5.0%} {found['imbalance']:6.3f} "
        f"{found['step_ms']:9.1f} {found['bubble']:4.0%} {found['gap']:4.0%} {found['schedule']:9s} "
        f"{_runs(found['replicas'])}"
    )


HEAD = (
    f"{'':28s} {'B':>6s} {'RaNNC':>6s} {'s':>6s} {'cpu s':>6s} {'RSS':>5s} {'peak GB':>8s} {'micros':>9s} "
    f"{'again':>5s} {'uneven':>6s} {'step ms':>9s} {'idle':>4s} {'gap':>4s} {'schedule':9s} replicas of the stages"
)


def _runs(replicas: Sequence[int]) -> str:
    """Return a text in which equal neighbours are counted: 4x8 2x4 is four stages of eight and two of four."""
    return " ".join(f"{len(list(stages))}x{width}" for width, stages in groupby(replicas))


def judged(done: dict[str, dict[str, Any]], known: Sequence[Case]) -> dict[str, bool]:
    """Return the claims about the results so far, and whether they hold."""
    good = {name for name, found in done.items() if found.get("fits")}
    claims = {f"all {len(done)} plan and fit": good == set(done)}
    claims["parameters as published"] = all(
        round(done[c.name]["parameters_b"], len(str(c.published_b).split(".")[1])) == c.published_b
        for c in known
        if c.name in good
    )
    for case in known:
        if case.like in good:
            ours, step = done[case.like], done.get(case.name, {}).get("step_ms")
            limit = next(c.imbalance for c in known if c.name == case.like)
            even = f"{case.like}: imbalance {ours['imbalance']:.3f}" + (f", published {limit}" if limit else "")
            faster = f"step {ours['step_ms']:.0f} ms, the published shape " + (f"{step:.0f} ms" if step else "fails")
            claims[f"{even}; {faster}"] = bool(limit and ours["imbalance"] <= limit) or bool(
                step and ours["step_ms"] <= step
            )
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of names; other recorded results are kept")
    given = parser.parse_args()
    shapes.warm()
    known = cases()
    print(HEAD, flush=True)
    for case in known:
        if re.search(given.only, case.name):
            found = shapes.alone(lambda case=case: result(case))  # type: ignore[misc]
            print(row(case, found), flush=True)
            done = {**recorded("published", "plans"), case.name: found}
            done = {case.name: done[case.name] for case in known if case.name in done}
            write("published", {"claims": judged(done, known), "plans": done})
    for claim, holds in judged(done, known).items():
        print("holds " if holds else "FAILS ", claim)


if __name__ == "__main__":
    main()
