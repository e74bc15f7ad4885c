"""Rows of the table from the answers of the ranks: throughput, MFU, prediction errors, loss differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from autopart.files.presets import DEVICES, NODES
from autopart.ir.cluster import Cluster, Level
from autopart.report.plan_table import table_lines
from benchmarks.gpu.jobs import FOLLOWED, Answer, Job
from benchmarks.gpu.workloads import workload
from benchmarks.shared.common import spread

ALIKE = {"fp32": 1e-5, "bf16": 2e-2, "bf16-parameters": 2e-2}
"""Largest relative difference of a loss from one process that counts as rounding, by precision."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16-parameters": "bfloat16"}


def preset(gpu: str, memory_bytes: int, world: int, local: int, gpus: int) -> Cluster | None:
    """Return a cluster of nodes with the named GPU from data sheets, with the measured memory; None for unknown GPUs.

    gpus: GPUs of a host with `local` ranks. If there are fewer GPUs than ranks, the ranks share rates and memory.
    """
    device = next((d for d in DEVICES.values() if d.name in gpu), None)
    node = next((n for n in NODES.values() if device is not None and n.device.name == device.name), None)
    if device is None or node is None:
        return None
    share = math.ceil(local / gpus)
    rates = tuple((name, rate // share) for name, rate in device.rates)
    one = type(device)(
        device.kind, memory_bytes // share, device.flops_per_s // share, device.mem_bytes_per_s // share, device.name,
        rates,
    )  # fmt: skip
    levels = [Level(local, node.inside)] + ([Level(world, node.network)] if world > local else [])
    return Cluster((one,) * world, tuple(levels))


def row_of(job: Job, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the row of a job. seconds: of the slowest rank in each step. Without seconds there is a reason."""
    row: dict[str, Any] = {
        "model": job.model, "plan": job.plan, "precision": job.precision, "world": job.world, "scale": job.scale,
    }  # fmt: skip
    missing = [(rank, answer) for rank, answer in enumerate(answers) if "reason" in answer]
    if missing:
        rank, first = min(missing, key=_came_later)
        return row | {"reason": first["reason"] if first.get("stays") else f"rank {rank}: {first['reason']}"}
    work = workload(job.model, job.scale, tiny=job.tiny, rows=job.rows)
    batch = job.world * work.rows
    first = answers[0]
    seconds = [max(column) for column in zip(*(answer["seconds"] for answer in answers), strict=True)]
    took = spread(seconds)
    row |= {
        "rows": batch, "unit": work.unit, "seconds": took, "per_second": batch * work.per_row / took.median,
        "devices": first["devices"], "micro_batches": len(first["micro_rows"]),
        "peak_bytes": [answer["peak_bytes"] for answer in answers],
        "launches": [answer.get("launches") for answer in answers],
    }  # fmt: skip
    kept = ("stages", "replicas", "schedule", "recomputed_ops", "costs", "simulated_bubble", "measured_bubble")
    row |= {name: first[name] for name in kept if name in first}
    if "simulated_s" in first:
        row["simulated_seconds"] = first["simulated_s"]
        row["step_error"] = first["simulated_s"] / took.median - 1
        row["predicted_peak_bytes"] = [answer["predicted_peak_bytes"] for answer in answers]
        row["peak_error"] = _errors(row["predicted_peak_bytes"], row["peak_bytes"])
    return row | compared(job.precision, answers)


def _came_later(entry: tuple[int, Answer]) -> tuple[bool, bool]:
    """Return a sort key that ranks first causes before ranks that only waited for others or timed out."""
    return entry[1]["reason"] == FOLLOWED, "late" in entry[1]


def _errors(predicted: Sequence[int | None], measured: Sequence[int | None]) -> list[float] | None:
    pairs = [(p, m) for p, m in zip(predicted, measured, strict=True) if p and m]
    return [p / m - 1 for p, m in pairs] or None


def compared(precision: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the losses of the first steps and the largest relative difference from one process."""
    losses = next((answer["losses"] for answer in answers if answer["losses"] is not None), None)
    found: dict[str, Any] = {"losses": losses}
    reference = answers[0].get("reference")
    if reference is None or losses is None:
        return found | {"no_reference": answers[0].get("no_reference", "no rank returned a loss")}
    off = max(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(losses, reference, strict=True))
    return found | {"reference": reference, "loss_difference": off, "alike": bool(off <= ALIKE[precision])}


def with_rates(rows: list[dict[str, Any]], flops: dict[str, float], cluster: Cluster | None) -> None:
    """Add the share of the devices' peak rate to each row. flops: of one row of the batch, by model."""
    for row in rows:
        if "seconds" not in row or not flops.get(row["model"]):
            continue
        row["flops"] = flops[row["model"]] * row["rows"]
        row["tflops_per_device"] = row["flops"] / row["seconds"].median / row["devices"] / 1e12
        if cluster is not None:
            rate = statistics.mean(device.rate(DTYPES[row["precision"]]) for device in cluster.devices)
            row["mfu"] = row["tflops_per_device"] * 1e12 / rate


HEADS = [
    "model", "plan", "precision", "stages", "micro", "step ms", "spread", "per s", "TFLOP/s", "MFU", "sim. step",
    "peak GiB", "predicted", "bubble", "sim. bubble", "launches", "loss off",
]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per row. The reasons of failed rows follow the table."""
    grid, reasons = [HEADS], []
    for row in rows:
        cells = [row["model"], row["plan"], row["precision"]]
        if "seconds" in row:
            grid.append(cells + _cells(row))
        else:
            reasons.append(row["reason"])
            grid.append([*cells, f"({len(reasons)})", *[""] * (len(HEADS) - 4)])
    lines = table_lines(grid, (0, 1, 2))
    return "\n".join([*lines, *(f" ({number}) {text}" for number, text in enumerate(reasons, 1))])


def _cells(row: dict[str, Any]) -> list[str]:
    took = row["seconds"]
    peaks = [p for p in row["peak_bytes"] if p]
    predicted = [p for p in row.get("predicted_peak_bytes", []) if p]
    return [
        "x".join(map(str, row["replicas"])) if "replicas" in row else "",
        str(row["micro_batches"]),
        f"{took.median * 1e3:.1f}",
        f"±{(took.high - took.low) / 2 / took.median:.1%}",
        f"{row['per_second']:,.0f} {row['unit']}",
        _number(row.get("tflops_per_device"), "{:.1f}"),
        _number(row.get("mfu"), "{:.1%}"),
        _number(row.get("step_error"), "{:+.1%}"),
        _number(max(peaks) / 2**30 if peaks else None, "{:.2f}"),
        _number(max(predicted) / 2**30 if predicted else None, "{:.2f}"),
        _number(row.get("measured_bubble"), "{:.1%}"),
        _number(row.get("simulated_bubble"), "{:.1%}"),
        _number(max((n for n in row.get("launches", []) if n), default=None), "{:,}"),
        _number(row.get("loss_difference"), "{:.0e}") + ("" if row.get("alike", True) else " !"),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
