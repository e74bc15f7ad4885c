"""The planner's cut compared with cuts made by hand.

By hand: equal numbers of layers, parameters or operations in each stage, cut between layers (embeddings stay with the
first layer, the head with the last). Measured: two Gloo ranks of one thread each, the same schedule and micro-batches
for all, training steps alternating in one run; ratios are taken pair by pair. Simulated: four stages of the same models
under the same costs. A ratio above 1 is time saved.

    python -m benchmarks.planning.splits               about 13 minutes on 2 cores; writes results/splits.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch

import autopart
from autopart.api import planned
from autopart.costs.detect import detect
from autopart.ir.graph import Graph
from autopart.options import read_options
from benchmarks.shared.alternation import alternate
from benchmarks.shared.bench_models import MODELS, BenchModel, training_step
from benchmarks.shared.common import ratio, spread, write

MICROS, STAGES = 4, 4
BY_HAND = ("equal layers", "equal parameters", "equal operations")


def weights(graph: Graph, model: BenchModel) -> dict[str, list[int]]:
    """Return the weight of each layer by each measure. Ops before the first or after the last layer count with it."""
    layer = [0] * len(graph.ops)
    at = 0
    for place, op in enumerate(graph.ops):
        if op.module.startswith(f"{model.layers}."):
            at = int(op.module[len(model.layers) + 1 :].split(".")[0])
        layer[place] = at
    size = {p.name: p.size_bytes for p in graph.params}
    seen: set[str] = set()
    held, work = [0] * model.count, [0] * model.count
    for place, op in zip(layer, graph.ops, strict=True):
        held[place] += sum(size[p] for p in op.params if p not in seen)
        seen.update(op.params)
        work[place] += op.cost.flops
    return dict(zip(BY_HAND, ([1] * model.count, held, work), strict=True))


def balanced(amounts: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the layers at which stages begin such that the heaviest stage is lightest, with the most even ones
    first.
    """

    def sums(cuts: Sequence[int]) -> list[int]:
        bounds = (0, *cuts, len(amounts))
        return sorted((sum(amounts[a:b]) for a, b in pairwise(bounds)), reverse=True)

    return min(combinations(range(1, len(amounts)), stages - 1), key=sums)


def by_hand(graph: Graph, model: BenchModel, stages: int) -> dict[str, tuple[str, ...]]:
    """Return the cuts as module paths, by measure."""
    return {
        name: tuple(f"{model.layers}.{layer}" for layer in balanced(amounts, stages))
        for name, amounts in weights(graph, model).items()
    }


def measure(cluster: autopart.Cluster, rounds: int, names: list[str]) -> dict[str, Any]:
    """Run the planner's plan and those by hand on one rank, one step each per round."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        model = MODELS[name]
        common: dict[str, Any] = {
            "sample": model.batch(), "stages": 2, "micro_batches": MICROS, "schedule": "1f1b", "costs": "measured",
            "optimizer": "adamw",
        }  # fmt: skip
        pipes = {"planned": autopart.compile(model.model(), cluster, **common)}
        for way, cuts in by_hand(pipes["planned"].session.graph, model, 2).items():
            pipes[way] = autopart.compile(model.model(), cluster, cuts=cuts, **common)
        steps = {
            way: training_step(partial(pipe.step, common["sample"]), pipe.parameters()) for way, pipe in pipes.items()
        }
        found[name] = {
            "seconds": alternate(steps, rounds).seconds,
            "simulated": {way: pipe.plan.step_ns * 1e-9 for way, pipe in pipes.items()},
        }
    return found


def simulated(name: str) -> dict[str, float]:
    """Return the seconds of the simulated step on four devices, from analytic costs."""
    model = MODELS[name]
    if model.count < STAGES + 1:
        return {}

    def plan(**more: Any) -> tuple[autopart.Plan, Graph]:
        options = read_options(
            stages=STAGES, micro_batches=8, costs="analytic", replicas=1, recompute="off", optimizer="adamw",
            schedule="1f1b", **more,
        )  # fmt: skip
        return planned(model.model(), "cpu:4", model.batch(), options)

    best, graph = plan()
    found = {"planned": best.step_ns * 1e-9}
    for way, cuts in by_hand(graph, model, STAGES).items():
        found[way] = plan(cuts=cuts)[0].step_ns * 1e-9
    return found


def report(measured: dict[str, Any], names: list[str], cluster: autopart.Cluster) -> None:
    rows = []
    for name in names:
        seconds, virtual = measured[name]["seconds"], simulated(name)
        gains = {way: ratio(seconds[way], seconds["planned"]) for way in BY_HAND}
        print(f"{name}: planned {spread(seconds['planned'])}")
        for way, gain in gains.items():
            two = measured[name]["simulated"]
            four = f", simulated on four {virtual[way] / virtual['planned']:.3f}x" if virtual else ""
            print(
                f"    {way:18s} measured {gain.median:.3f}x [{gain.low:.3f}, {gain.high:.3f}], "
                f"simulated {two[way] / two['planned']:.3f}x{four}"
            )
        rows.append(
            {
                "model": name, "seconds": {way: spread(s) for way, s in seconds.items()}, "gain": gains,
                "simulated_seconds": measured[name]["simulated"], "simulated_on_four_seconds": virtual,
            }
        )  # fmt: skip
    print("written to", write("splits", {"cluster": cluster, "models": rows}).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = detect(2)
    results = autopart.launch(measure, "cpu:2", cluster, given.rounds, given.models)
    report(results[0], given.models, cluster)


if __name__ == "__main__":
    main()
