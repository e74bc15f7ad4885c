"""Processes with unequal shares of a core: a step as planned for them, and as planned for equal devices.

Gloo ranks with 1 thread, each in a control group whose quota is its share of a core (`shared/quotas.py`): three with 1,
1/2 and 1/4, four with 1, 2/5, 1/5 and 1/5.  Costs of ops are measured on rank 0, which has a whole core, by `compile`;
the cluster says what share each rank has.  Rounds of the two plans alternate.  A step ends with SGD's.

    python -m benchmarks.planning.unequal_shares              five minutes on idle cores; writes unequal_shares.json
    python -m benchmarks.planning.unequal_shares --width 128 --rounds 1       small, writes nothing
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from autopart.costs.detect import detect
from autopart.ir.cluster import Device
from benchmarks.shared.common import ratio, spread, write
from benchmarks.shared.quotas import enter, parts_of_cores, why_not

SHARES = ((1.0, 0.5, 0.25), (1.0, 0.4, 0.2, 0.2))
LAYERS, ROWS, STEPS = 24, 512, 8
FASTER, WITHIN = 1.25, 0.10
"""What is asked: how many times as fast the step is as under the plan for equal devices, and the error of its time."""


def slower(device: Device, share: float) -> Device:
    """Return a device with a share of the rates of another, under a name of its own."""
    return replace(
        device,
        name=f"{share:g} of a core",
        flops_per_s=int(device.flops_per_s * share),
        mem_bytes_per_s=int(device.mem_bytes_per_s * share),
        rates=tuple((dtype, int(rate * share)) for dtype, rate in device.rates),
    )


def measure(
    folders: Sequence[Path], shares: Sequence[float], cluster: autopart.Cluster, width: int, rounds: int
) -> dict[str, Any]:
    """Return, on each rank, the seconds of steps under both plans and what was planned."""
    torch.set_num_threads(1)
    enter(folders[int(os.environ["RANK"])])
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))
    x, y = torch.randn(2, ROWS, width, generator=torch.Generator().manual_seed(0))
    kinds = tuple(slower(cluster.devices[0], share) for share in shares)
    equal = replace(cluster, devices=(kinds[0],) * len(shares))
    clusters = {"planned": replace(cluster, devices=kinds), "equal": equal}
    found: dict[str, Any] = {name: {"seconds": [], "plans": [], "predicted": []} for name in clusters}
    for _ in range(rounds):
        for name, each in clusters.items():
            with autopart.compile(
                model, each, sample=(x, y), loss_fn=nn.functional.mse_loss, costs="measured", optimizer="sgd"
            ) as pipe:
                optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
                found[name]["predicted"].append(pipe.plan.step_ns * 1e-9)
                found[name]["plans"].append(_said(pipe.plan))
                for number in range(STEPS):
                    began = time.perf_counter()
                    pipe.step((x, y))
                    optimizer.step()
                    optimizer.zero_grad()
                    if number > 1:
                        found[name]["seconds"].append(time.perf_counter() - began)
    return found


def _said(plan: autopart.Plan) -> str:
    stages = [f"{len(stage.ops)} ops on ranks {stage.ranks} in shares {stage.shares}" for stage in plan.stages]
    return f"{plan.decision.schedule}, {len(plan.micro_rows)} micro-batches, {', '.join(stages)}"


def report(shares: Sequence[float], ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return what one set of shares took; the slowest rank counts for each step."""
    took = {
        name: [max(step) for step in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)] for name in ranks[0]
    }
    faster, step = ratio(took["equal"], took["planned"]), spread(took["planned"])
    predicted = spread(ranks[0]["planned"]["predicted"]).median
    error = predicted / step.median - 1
    print(f"shares {shares}: planned {step}\n  for equal devices {spread(took['equal'])}")
    print(f"  {faster.median:.2f} times as fast [{faster.low:.2f}, {faster.high:.2f}], asked {FASTER}")
    print(f"  predicted {predicted:.4f} s, {error:+.1%}, asked within {WITHIN:.0%}")
    for name in took:
        print(f"  {name}: " + "\n    ".join(dict.fromkeys(ranks[0][name]["plans"])))
    return {
        "shares": shares, "planned": asdict(step), "equal": asdict(spread(took["equal"])), "times as fast":
        asdict(faster), "predicted": ranks[0]["planned"]["predicted"], "error": error,
        "plans": {name: ranks[0][name]["plans"] for name in took},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for shares in SHARES:
        cluster, world = detect(len(shares)), f"cpu:{len(shares)}"
        with parts_of_cores(shares) as folders:
            ranks = autopart.launch(measure, world, folders, shares, cluster, given.width, given.rounds)
        rows.append(report(shares, ranks))
    claims = dict[str, bool]()
    for row in rows:
        what, faster, error = f"{len(row['shares'])} processes", row["times as fast"]["median"], row["error"]
        claims[f"{what}: {faster:.2f} times as fast as planned for equal devices, at least {FASTER}"] = faster >= FASTER
        claims[f"{what}: predicted with {error:+.1%}, within {WITHIN:.0%}"] = abs(error) <= WITHIN
    if (given.width, given.rounds) == (parser.get_default("width"), parser.get_default("rounds")):
        print("written to", write("unequal_shares", {"claims": claims, "cases": rows}).name)


if __name__ == "__main__":
    main()
