"""Processes with unequal shares of a core: a step as planned for them, and as planned for equal devices.

Gloo ranks with 1 thread, each in a control group whose quota is its share of a core (`shared/quotas.py`): three with 1,
1/2 and 1/4, four with 1, 2/5, 1/5 and 1/5.  Costs of ops are measured in processes that have a core each; the cluster
says what share each rank really gets, which is measured first, while all compute.  Rounds of the two plans alternate.
A step ends with SGD's.  The steps are compared with simulations by costs that are measured before and after each round,
since the cores of a virtual machine change their speed, and on all cores at once, since they are as busy in a step and
may be threads of one core of the machine below.

    python -m benchmarks.planning.unequal_shares              seven minutes on idle cores; writes unequal_shares.json
    python -m benchmarks.planning.unequal_shares --width 128 --rounds 1       small, writes nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopart
from autopart.cli.host_costs import detect_all
from autopart.costs.detect import detect
from autopart.ir.cluster import Cluster, Device
from benchmarks.shared.common import nothing_kept, ratio, shape_of, spread, write
from benchmarks.shared.quotas import attained, cores_of, enter, leave, parts_of_cores, why_not

SHARES = ((1.0, 0.5, 0.25), (1.0, 0.4, 0.2, 0.2))
LAYERS, ROWS, STEPS, SPIN_S = 24, 512, 8, 3.0
OPTIONS: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "measured", "optimizer": "sgd"}
Planned = tuple[Cluster, autopart.Plan]
Seconds = dict[str, list[float]]
"""Of the steps of a rank, by plan."""
FASTER, WITHIN = 1.25, 0.10
"""What is asked: how many times as fast the step is as under the plan for equal devices, and the error of its time."""


def real_shares(shares: Sequence[float]) -> list[float]:
    """Return the shares of a core that ranks with these quotas get, all at once."""
    with parts_of_cores(shares) as folders:
        return autopart.launch(real_share, f"cpu:{len(shares)}", folders, cores_of(shares))


def real_share(folders: Sequence[Path], cores: Sequence[set[int]]) -> float:
    """Return the share that this rank gets."""
    rank = int(os.environ["RANK"])
    return attained(folders[rank], cores[rank], SPIN_S)


def planned(model: nn.Module, batch: Any, device: Device, shares: Sequence[float]) -> dict[str, Planned]:
    """Return the plan for devices with these shares of a core, and that for as many equal devices, with their cluster.

    Costs of ops are measured here, in a process that has a core for itself.
    """
    found = detect_all(len(shares))
    equal = Cluster((device,) * len(shares), found.levels, host=found.host)
    clusters = {"planned": equal.with_speeds(shares), "equal": equal}
    return {name: (each, autopart.plan(model, each, sample=batch, **OPTIONS)) for name, each in clusters.items()}


def forecast(planned: Planned, width: int) -> float:
    """Return the seconds of a simulated step, by costs that are measured now on all cores at once: their mean."""
    found: list[float] = autopart.launch(simulated, f"cpu:{os.cpu_count()}", planned, width)
    return statistics.mean(found)


def simulated(planned: Planned, width: int) -> float:
    """Return the seconds of a simulated step, by costs that this rank measures while the others do."""
    torch.set_num_threads(1)
    (cluster, plan), (model, batch) = planned, built(width)
    with nothing_kept():
        taken: int = autopart.simulate(plan, model, cluster, sample=batch, **OPTIONS).step_ns
    return taken * 1e-9


def built(width: int) -> tuple[nn.Module, Any]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())))
    return model, tuple(torch.randn(2, ROWS, width, generator=torch.Generator().manual_seed(0)))


def measure(folders: Sequence[Path], cores: Sequence[set[int]], plans: dict[str, Planned], width: int) -> Seconds:
    """Return, on each rank, the seconds of steps under each plan, with this rank's share of a core."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[int(os.environ["RANK"])])
    seconds: Seconds = {}
    for name, (cluster, plan) in plans.items():
        model, batch = built(width)
        with autopart.compile(model, cluster, sample=batch, plan=plan, loss_fn=OPTIONS["loss_fn"]) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
            enter(folders[pipe.rank])
            for number in range(STEPS):
                began = time.perf_counter()
                pipe.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                if number > 1:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
            leave()
    return seconds


def report(
    shares: Sequence[float],
    plans: dict[str, Planned],
    rounds: Sequence[Sequence[Seconds]],
    forecasts: Sequence[float],
) -> dict[str, Any]:
    """Print and return what one set of shares took; the slowest rank counts for each step.

    rounds: what each rank took in each.  forecasts: seconds.
    """
    took = {
        name: [max(step) for ranks in rounds for step in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in plans
    }
    faster, step = ratio(took["equal"], took["planned"]), spread(took["planned"])
    predicted = statistics.mean(forecasts)
    error = predicted / step.median - 1
    print(f"shares {shares}: planned {step}\n  for equal devices {spread(took['equal'])}")
    print(f"  {faster.median:.2f} times as fast [{faster.low:.2f}, {faster.high:.2f}], asked {FASTER}")
    print(f"  predicted {predicted:.4f} s, {error:+.1%}, asked within {WITHIN:.0%}")
    for name, (_, plan) in plans.items():
        print(f"  {name}: {shape_of(plan)}")
    return {
        "shares": shares, "planned": asdict(step), "equal": asdict(spread(took["equal"])), "times as fast":
        asdict(faster), "predicted": predicted, "forecasts": forecasts, "error": error,
        "plans": {name: shape_of(plan) for name, (_, plan) in plans.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    device, rows = detect(1).devices[0], []
    for shares in SHARES:
        model, batch = built(given.width)
        real = real_shares(shares)
        print("shares", shares, "of which ranks get", [round(share, 3) for share in real])
        plans = planned(model, batch, device, real)
        forecasts, found = [forecast(plans["planned"], given.width)], list[list[Seconds]]()
        for _ in range(given.rounds):
            with parts_of_cores(shares) as folders:
                ranks = f"cpu:{len(shares)}"
                found.append(autopart.launch(measure, ranks, folders, cores_of(shares), plans, given.width))
            forecasts.append(forecast(plans["planned"], given.width))
        rows.append({"real shares": real, **report(shares, plans, found, forecasts)})
    claims = dict[str, bool]()
    for row in rows:
        what, faster, error = f"{len(row['shares'])} processes", row["times as fast"]["median"], row["error"]
        claims[f"{what}: {faster:.2f} times as fast as planned for equal devices, at least {FASTER}"] = faster >= FASTER
        claims[f"{what}: predicted with {error:+.1%}, within {WITHIN:.0%}"] = abs(error) <= WITHIN
    if (given.width, given.rounds) == (parser.get_default("width"), parser.get_default("rounds")):
        print("written to", write("unequal_shares", {"claims": claims, "cases": rows}).name)


if __name__ == "__main__":
    main()
