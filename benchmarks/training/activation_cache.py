"""What keeping the activations of frozen layers saves, and whether a step then takes what was simulated.

A ViT of 8 layers (shared/bench_models.py) on two Gloo ranks, one thread each, over a data set of four batches, as
often as asked, planned for the machine as `autopart cluster detect` measures it.  First everything learns; then the
embeddings and the first six layers are frozen, and a plan for the whole model is made; then one that may begin behind
them.  Times are of `pipe.step` with the step of the optimizer, which the simulator counts as well, on the slower rank;
under the last plan only of steps in which every sample is read.

    python -m benchmarks.training.activation_cache            4 minutes on 2 cores; writes results/activation_cache.json
    python -m benchmarks.training.activation_cache --epochs 2    short, writes nothing
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

import autopart
from autopart.cli.host_costs import detect_all
from autopart.extras.freezing.kept.activations import activations_of
from autopart.ir.cluster import Cluster
from benchmarks.shared.bench_models import MODELS
from benchmarks.shared.common import spread, write

BATCHES, MORE, FROZEN, WITHIN = 4, 8, 6, 0.10
"""Batches of the data set, how often each has the rows of bench_models (128 rows: a step behind the frozen layers takes
0.4 seconds, so what every step costs beside its ops counts little), layers that are frozen, and how far the measured
step may be from the simulated one."""


def measure(cluster: Cluster, epochs: int) -> dict[str, Any]:
    """Train in the three ways; return the seconds of steps, and what was simulated, on one rank."""
    torch.set_num_threads(1)
    kind = MODELS["vit"]
    torch.manual_seed(0)
    model = kind.model()
    one = {name: torch.cat([value] * MORE) for name, value in kind.batch().items()}
    batches = [one | {"pixel_values": one["pixel_values"].roll(number, 0) + number} for number in range(BATCHES)]
    rows = len(one["pixel_values"])
    with autopart.compile(model, cluster, sample=batches[0], costs="measured") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)

        def epoch() -> list[float]:
            times = []
            for number, batch in enumerate(batches):
                names = range(number * rows, (number + 1) * rows)
                began = time.perf_counter()
                pipe.step(batch, samples=names)
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - began)
            return times

        def stage(simulated: float, *, skipped: int) -> dict[str, Any]:
            first = [second for _ in range(skipped) for second in epoch()]
            return {"simulated": simulated, "first": first, "steps": [s for _ in range(epochs) for s in epoch()]}

        found = {"all layers learn": stage(pipe.plan.step_ns * 1e-9, skipped=1)}
        for name, parameter in pipe.model.named_parameters():
            parameter.requires_grad_(not (_layer(name) < FROZEN))
        done = pipe.replan(optimizer)
        found["frozen"] = stage(done.after_s if done.adopted else done.before_s, skipped=1)
        done = pipe.replan(optimizer, cache=autopart.freeze.AutoCache(1 << 30, samples=BATCHES * rows))
        counts = activations_of(pipe.session).counts
        found["kept"] = stage(done.after_s, skipped=1) | {
            "reason": done.reason, "cached": done.cached, "reading": done.reading_s,
            "plan": [len(each.ranks) for each in pipe.plan.stages],
            "rows read and computed": [counts.read, counts.computed],
        }  # fmt: skip
    return found


def _layer(name: str) -> int:
    """Return the number of a parameter's layer; -1 of embeddings, and a large number of what comes behind."""
    if "embeddings" in name:
        return -1
    numbers = [int(word) for word in name.split(".") if word.isdigit()]
    return numbers[0] if "layer" in name and numbers else 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = autopart.launch(measure, "cpu:2", detect_all(2), given.epochs)
    content: dict[str, Any] = {}
    for name, own in ranks[0].items():
        slower = [max(pair) for pair in zip(*(rank[name]["steps"] for rank in ranks), strict=True)]
        measured = spread(slower)
        off = measured.median / own["simulated"] - 1
        content[name] = own | {"steps": slower, "measured": measured, "off": off}
        print(f"{name}: measured {measured}, simulated {own['simulated']:.4f} s, off by {off:+.1%}")
    kept, frozen, whole = (content[name]["measured"].median for name in ("kept", "frozen", "all layers learn"))
    print(f"{content['kept']['reason']}\nplan: replicas of each stage {content['kept']['plan']}")
    print(f"{whole / kept:.2f} x as fast as without freezing, {frozen / kept:.2f} x as fast as frozen without a cache")
    print(f"asked: measured within {WITHIN:.0%} of simulated once samples are read")
    if given.epochs == parser.get_default("epochs"):
        print("written to", write("activation_cache", content).name)


if __name__ == "__main__":
    main()
