"""Models x plans x precisions on the GPUs that torchrun started: one JSON, one table.

Every row runs in processes of its own.  What a combination cannot do, or what fails or hangs, is a row with the reason.
docs/benchmarks.md has the commands for one GPU, a node, and several nodes, and says what the columns are.

    python benchmarks/gpu                                           one GPU
    torchrun --nproc-per-node 8 benchmarks/gpu                      a node
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu --dry-run   on CPUs, tiny shapes: does all of it work?
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Whoever forks processes that use CUDA must not touch it: torch then asks the driver's library for the devices.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from common import RESULTS, write

from autopart.files.clusters import cluster_to_dict, parse_cluster
from autopart.ir.cluster import Cluster
from gpu.jobs import PRECISIONS, Job
from gpu.measure import count_work, describe, measured_cluster, perform
from gpu.pool import Pool
from gpu.rows import preset, row_of, table, with_rates
from gpu.ways import WAYS
from gpu.workloads import MODELS

DEFAULT = ["gpt2-xl", "llama-1b", "bert-large", "vit-large", "resnet-152"]


def flags() -> argparse.ArgumentParser:
    """What may be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=DEFAULT)
    parser.add_argument("--plans", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16"])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers that is built")
    parser.add_argument("--rows", type=int, help="rows of the batch for each device; default: by model")
    parser.add_argument("--micro-batches", type=int, help="default: ours chooses, others take 4 for each stage")
    parser.add_argument("--transport", choices=["nccl", "gloo"], default="nccl", help="of messages between GPUs")
    parser.add_argument(
        "--cluster", default="preset", help="preset (data sheets), measured, or a description as compile takes it"
    )
    parser.add_argument("--costs", default="auto", help="as compile takes them: auto, measured, analytic")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one row, planning included")
    parser.add_argument("--name", default="gpu", help="the results are results/NAME.json")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the results are written")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on CPUs")
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """On every rank; the first one prints and writes."""
    given = flags().parse_args(args)
    pool = Pool()
    machines = pool.run(describe, limit_s=120.0)
    if failed := [m["reason"] for m in machines if "reason" in m]:
        raise SystemExit(f"the machines do not answer: {failed[0]}")
    suite = Suite(given, pool, machines, _base(given, pool, machines))
    for model in given.models:
        for precision in given.precisions:
            suite.compare(model, precision)
        suite.count(model)
    if pool.rank == 0:
        print(table(suite.rows), f"written to {suite.write().name}", sep="\n", flush=True)


@dataclass
class Suite:
    """What has been found so far: rows, and FLOPs of a row of the batch by model.  base: what all jobs share."""

    given: argparse.Namespace
    pool: Pool
    machines: list[dict[str, Any]]
    base: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)

    def compare(self, model: str, precision: str) -> None:
        """A row for each plan.  Collective, as all of this."""
        known: dict[tuple[int, ...], list[float]] = {}
        for plan in self.given.plans:
            job = Job(**self.base, model=model, plan=plan, precision=precision, references=known)
            answers = self.pool.run(perform, job, limit_s=self.given.limit)
            first = answers[0]
            if "reference" in first:
                known[tuple(first["reference_rows"])] = first["reference"]
            if "flops_per_row" in first:
                self.flops.setdefault(model, first["flops_per_row"])
            self.rows.append(row_of(job, answers))
            if self.pool.rank == 0:
                print(f"{time.strftime('%H:%M:%S')}  {job.name}: {_brief(self.rows[-1])}", file=sys.stderr, flush=True)
                self.write()  # whoever ends the suite keeps what it found

    def count(self, model: str) -> None:
        """The FLOPs of a model that no plan of ours ran."""
        if model not in self.flops:
            job = Job(**self.base, model=model, plan="ours", precision="fp32")
            answer = self.pool.run(count_work, job, limit_s=self.given.limit)[0]
            self.flops[model] = answer.get("flops_per_row", 0.0)

    def write(self) -> Path:
        """All of it, to the file of the results."""
        cluster = self.base["cluster"]
        with_rates(self.rows, self.flops, cluster)
        hosts = {m["host"]: {k: v for k, v in m.items() if k != "host"} for m in self.machines}
        content = {
            "hosts": [hosts[name] for name in hosts], "world": self.pool.world, "kind": self.base["kind"],
            "transport": self.given.transport if self.base["kind"] == "cuda" else "gloo",
            "planned_for": cluster_to_dict(cluster) if cluster else "what the launcher says",
            "planned_for_is": self.given.cluster, "flops_per_row": self.flops, "rows": self.rows,
        }  # fmt: skip
        return write(self.given.name, content, command=_command(self.pool), folder=self.given.folder)


def _base(given: argparse.Namespace, pool: Pool, machines: list[dict[str, Any]]) -> dict[str, Any]:
    """What all jobs share."""
    kind = "cpu" if given.dry_run or not all(m["gpus"] for m in machines) else "cuda"
    base = {
        "kind": kind, "world": pool.world, "local": pool.local, "scale": given.scale, "tiny": given.dry_run,
        "rows": given.rows, "micro_batches": given.micro_batches, "transport": given.transport, "costs": given.costs,
        "warmup": given.warmup, "repeats": given.repeats,
    }  # fmt: skip
    return base | {"cluster": _cluster(given, pool, machines, base)}


def _cluster(
    given: argparse.Namespace, pool: Pool, machines: list[dict[str, Any]], base: dict[str, Any]
) -> Cluster | None:
    """What is planned for; None for what the launcher says, with typical rates."""
    if given.cluster == "preset":
        if base["kind"] == "cpu":
            return None
        gpus = min(m["gpus"] for m in machines)
        memory = min(m["gpu_bytes"] for m in machines)
        return preset(machines[0]["gpu"], memory, pool.world, pool.local, gpus)
    if given.cluster != "measured":
        return parse_cluster(given.cluster)
    job = Job(**base, model=given.models[0], plan="ours", precision="fp32")
    answer = pool.run(measured_cluster, job, limit_s=300.0)[0]
    if "reason" in answer:
        raise SystemExit(f"the cluster cannot be measured: {answer['reason']}")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(answer["cluster"], file)
        file.flush()
        return parse_cluster(file.name)


def _command(pool: Pool) -> str:
    given = sys.argv[1:]
    if "--folder" in given:  # where this machine has its files is no part of the experiment
        place = given.index("--folder")
        given = given[:place] + given[place + 2 :]
    words = shlex.join(given)
    nodes = pool.world // max(1, pool.local)
    how = f"torchrun --nnodes {nodes} --nproc-per-node {pool.local}" if pool.world > 1 else "python"
    return f"{how} benchmarks/gpu {words}".strip()


def _brief(row: dict[str, Any]) -> str:
    return f"{row['seconds'].median * 1e3:.1f} ms" if "seconds" in row else row["reason"]
