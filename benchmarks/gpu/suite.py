"""Models x plans x precisions on the GPUs that torchrun started, as one JSON file and one table.

Every row runs in separate processes. An impossible, failed or hanging combination is a row with the reason.
docs/benchmarks.md has the commands for one GPU, a node, and several nodes, and explains the columns.

    python benchmarks/gpu                                           one GPU
    torchrun --nproc-per-node 8 benchmarks/gpu                      a node
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu --dry-run   tiny shapes on CPUs, as a test
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

# A process that forks CUDA users must not use CUDA itself: with this variable torch finds devices through NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from autopart.files.clusters import cluster_to_dict, parse_cluster
from autopart.ir.cluster import Cluster
from benchmarks.gpu.jobs import PRECISIONS, Job
from benchmarks.gpu.measure import count_work, describe, measured_cluster, perform
from benchmarks.gpu.plans import EAGER, PLANS
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.rows import preset, row_of, table, with_rates
from benchmarks.gpu.workloads import MODELS
from benchmarks.shared.common import RESULTS, write

DEFAULT = ["gpt2-xl", "llama-1b", "bert-large", "vit-large", "resnet-152"]


def flags() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=DEFAULT)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=EAGER)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16"])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the layers to build")
    parser.add_argument("--rows", type=int, help="rows of the batch per device (default: by model)")
    parser.add_argument("--micro-batches", type=int, help="default: autopart chooses, others use 4 per stage")
    parser.add_argument(
        "--transport", choices=["nccl", "gloo"], default="nccl", help="transport of messages between GPUs"
    )
    parser.add_argument(
        "--cluster", default="preset", help="preset (data sheets), measured, or a cluster as for autopart.compile"
    )
    parser.add_argument("--costs", default="auto", help="auto, measured or analytic")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--limit", type=float, default=600.0, help="time limit of one row in seconds, including planning"
    )
    parser.add_argument("--name", default="gpu", help="name of the result file: results/NAME.json")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on CPUs")
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark on every rank. Rank 0 prints and writes the results."""
    given = flags().parse_args(args)
    pool = Pool()
    machines = pool.run(describe, limit_s=120.0)
    if failed := [m["reason"] for m in machines if "reason" in m]:
        raise SystemExit(f"a machine cannot be described: {failed[0]}")
    suite = Suite(given, pool, machines, _base(given, pool, machines))
    for model in given.models:
        for precision in given.precisions:
            suite.compare(model, precision)
        suite.count(model)
    if pool.rank == 0:
        print(table(suite.rows), f"written to {suite.write().name}", sep="\n", flush=True)


@dataclass
class Suite:
    """The results so far: rows, and FLOPs per row of the batch by model. base: arguments common to all jobs."""

    given: argparse.Namespace
    pool: Pool
    machines: list[dict[str, Any]]
    base: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)

    def compare(self, model: str, precision: str) -> None:
        """Add a row for each plan. Collective, like all methods."""
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
                self.write()  # an interrupted run keeps its results

    def count(self, model: str) -> None:
        """Count the FLOPs of a model that autopart did not run."""
        if model not in self.flops:
            job = Job(**self.base, model=model, plan="ours", precision="fp32")
            answer = self.pool.run(count_work, job, limit_s=self.given.limit)[0]
            self.flops[model] = answer.get("flops_per_row", 0.0)

    def write(self) -> Path:
        """Write all results to the file."""
        cluster = self.base["cluster"]
        with_rates(self.rows, self.flops, cluster)
        hosts = {m["host"]: {k: v for k, v in m.items() if k != "host"} for m in self.machines}
        content = {
            "hosts": [hosts[name] for name in hosts], "world": self.pool.world, "kind": self.base["kind"],
            "transport": self.given.transport if self.base["kind"] == "cuda" else "gloo",
            "planned_for": cluster_to_dict(cluster) if cluster else "the launcher's devices",
            "planned_for_is": self.given.cluster, "flops_per_row": self.flops, "rows": self.rows,
        }  # fmt: skip
        return write(self.given.name, content, command=_command(self.pool), folder=self.given.folder)


def _base(given: argparse.Namespace, pool: Pool, machines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments common to all jobs."""
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
    """Return the cluster to plan for; None for the launcher's devices with typical rates."""
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
    if "--folder" in given:  # the output folder is not part of the experiment
        place = given.index("--folder")
        given = given[:place] + given[place + 2 :]
    words = shlex.join(given)
    nodes = pool.world // max(1, pool.local)
    how = f"torchrun --nnodes {nodes} --nproc-per-node {pool.local}" if pool.world > 1 else "python"
    return f"{how} benchmarks/gpu {words}".strip()


def _brief(row: dict[str, Any]) -> str:
    return f"{row['seconds'].median * 1e3:.1f} ms" if "seconds" in row else row["reason"]
