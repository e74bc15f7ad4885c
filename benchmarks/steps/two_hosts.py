"""Training over two hosts with a slow link: exact, and as fast as predicted.

Two network namespaces stand for the hosts (`hosts.py`); torchrun starts one or two ranks in each. GPT-2 of 2 layers in
two stages, a stage on each host with as many replicas as the host has ranks, 4 micro-batches, 1F1B. Every gradient is
compared with one process, then steps are measured and simulated, as in `prediction.py`, with the link of the cluster
description: the limited rate without TCP headers (1448 of 1514 bytes are payload).

    python -m benchmarks.steps.two_hosts            about 3 minutes on 2 cores; writes results/two_hosts.json
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import autopart
from autopart.files.clusters import link_within_host, parse_cluster
from autopart.ir.cluster import Cluster, Level, Link
from benchmarks.planning.prediction import predicted, timed_step
from benchmarks.shared.bench_models import BenchModel, gpt2, tokens
from benchmarks.shared.common import spread, write
from benchmarks.shared.hosts import LATENCY_NS, PAYLOAD, leave, on_both, why_not

MODEL = BenchModel(gpt2(512, 256, 2), tokens(512, 16, 96), "transformer.h", 2)
"""A shallow model, so that messages take most of the step."""
CUT, MICROS = "transformer.h.1", 4
RATES = (10, 30)
"""Rates of the link in Mbit/s."""
RANKS = (1, 2)
"""Ranks of each host: with 2, every stage has two replicas."""


def cluster_of(mbit: int, ranks: int = 1) -> Cluster:
    """Return two hosts of `ranks` CPU ranks each, and the link between them."""
    between = Link(LATENCY_NS, int(mbit * 125_000 * PAYLOAD))
    return Cluster(
        parse_cluster(f"cpu:{2 * ranks}").devices, (Level(ranks, link_within_host("cpu")), Level(2 * ranks, between))
    )


def on_rank(mbit: int, rounds: int) -> dict[str, Any]:
    """Compare a step with one process, then measure and predict steps, on one rank."""
    torch.set_num_threads(1)
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    case, cluster = MODEL, cluster_of(mbit, ranks)
    options: dict[str, Any] = {"stages": 2, "cuts": (CUT,), "micro_batches": MICROS, "schedule": "1f1b"}
    options |= {"recompute": "off", "optimizer": "sgd", "replicas": ranks}
    checked = autopart.verify(case.model(), cluster, sample=case.batch(), costs="analytic", **options)
    batch = case.batch()
    with autopart.compile(case.model(), cluster, sample=batch, costs="measured", **options) as pipe:
        seconds, forecasts = [], [predicted(pipe, batch)]
        for number in range(2 + rounds):
            taken_s = timed_step(pipe, batch)
            if number >= 2:
                seconds.append(taken_s)
            if number == rounds // 2:
                forecasts.append(predicted(pipe, batch))
        forecasts.append(predicted(pipe, batch))
        stage_ranks = pipe.program.stage_ranks
        pipe.close(sync=False)
    return {
        "exact": checked.ok, "largest_gradient_error": checked.largest, "seconds": seconds,
        "predicted": statistics.median(forecast.step_ns * 1e-9 for forecast in forecasts), "stage_ranks": stage_ranks,
    }  # fmt: skip


def compared(rates: Sequence[int], rounds: int, ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    """Return a row for each number of ranks per host and each rate."""
    rows = []
    for count in ranks:
        for mbit in rates:
            given = ["--rates", str(mbit), "--rounds", str(rounds)]
            found = on_both("benchmarks.steps.two_hosts", given, mbit, ranks=count)
            took = spread(found.pop("seconds"))
            error = found["predicted"] / took.median - 1
            cluster = cluster_of(mbit, count)
            rows.append({"mbit": mbit, "ranks": count, "cluster": cluster, "measured": took, "error": error, **found})
            print(
                f"{count} per host  {mbit:5} Mbit/s  {took}  predicted {found['predicted']:.4f} s  {error:+.1%}  "
                f"exact: {found['exact']}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="rates of the link in Mbit/s")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="ranks of each host")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        leave(on_rank(given.rates[0], given.rounds), given.rank_of)
        return
    if reason := why_not():
        raise SystemExit(f"cannot create two hosts: {reason}")
    rows = compared(given.rates, given.rounds, given.ranks)
    claims = {
        "exact": all(row["exact"] for row in rows),
        "predicted within 15 %": all(abs(row["error"]) <= 0.15 for row in rows),
    }
    print("written to", write("two_hosts", {"rows": rows, "claims": claims}).name)


if __name__ == "__main__":
    main()
