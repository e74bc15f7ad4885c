"""Draw several plans of one model, a line each: of several clusters, or of several wishes.

What a plan would deliver: samples and tokens per second, model FLOPs utilisation (MFU), memory, and money.  MFU is the
FLOPs of the model (`passes.ops.flops`) over those that all devices could do at their peak rates in the time of a
step.  The peak is that of the dtype of most of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopart.ir.cluster import Cluster
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.report.plan_table import table_lines

GIB = 2**30


@dataclass(frozen=True)
class Answer:
    """The plan for one question, or why there is none.

    name: what was asked.  tokens: of each sequence, None for batches without sequences.  plan, graph: the plan and the
    captured graph that it is for, both None if refused says why.  flops: of the model at the size of that graph, by
    dtype (`model_flops`).
    """

    name: str
    cluster: Cluster
    tokens: int | None
    plan: Plan | None = None
    graph: Graph | None = None
    flops: Mapping[str, int] = field(default_factory=dict)
    refused: AutopartError | None = None

    def delivered(self) -> dict[str, float] | None:
        """Return what a step of the plan delivers; None without one, or without its simulated step.

        tokens_per_s: 0 for batches without sequences.  flops: of the model in a step.  mfu: the share of the peak, 0 to
        1.  peak_bytes, limit_bytes: of the device with the least room.  price_per_step: in the currency of the cluster
        file, 0 where it has no price.
        """
        plan = self.plan
        if plan is None or self.graph is None or not plan.step_ns or not plan.estimates:
            return None
        seconds, rows, devices = plan.step_ns / 1e9, sum(plan.micro_rows), self.cluster.devices
        flops = sum(self.flops.values()) * rows // self.graph.rows
        peak = sum(device.rate(max(self.flops, key=self.flops.__getitem__)) for device in devices)
        memory = [
            (self.cluster.least_memory_bytes(stage.ranks), estimate.peak_bytes)
            for stage, estimate in zip(plan.stages, plan.estimates, strict=True)
        ]
        limit_bytes, peak_bytes = min(memory, key=lambda each: each[0] - each[1])
        return {
            "step_s": seconds,
            "rows_per_s": rows / seconds,
            "tokens_per_s": rows * (self.tokens or 0) / seconds,
            "flops": flops,
            "mfu": flops / (peak * seconds),
            "peak_bytes": peak_bytes,
            "limit_bytes": limit_bytes,
            "price_per_step": sum(device.price_per_hour for device in devices) / 3600 * seconds,
        }


def comparison_table(answers: Sequence[Answer], column: str) -> str:
    """Return a line for each answer, and below why some have no plan.  column: the heading of their names."""
    rows = [_row(answer, column) for answer in answers]
    names = dict.fromkeys(name for row in rows for name in row)
    header = [name for name in names if any(row.get(name) for row in rows)]
    lines = table_lines([header, *([row.get(name, "") for name in header] for row in rows)], [0, len(header) - 1])
    lines += [
        "simulated, not measured; memory: of the device with the least room",
        "MFU: FLOPs of the model's forward and backward over those of all devices at their peak rates",
    ]
    for answer in answers:
        if answer.refused is not None:
            lines.append(f"{answer.name}: {answer.refused}")
    return "\n".join(lines) + "\n"


def comparison_facts(answers: Sequence[Answer]) -> dict[str, object]:
    """Return the same as data: seconds, bytes, numbers that are not rounded."""
    return {"answers": [_facts(answer) for answer in answers]}


def _row(answer: Answer, column: str) -> dict[str, str]:
    found = answer.delivered()
    if found is None or answer.plan is None:
        return {column: answer.name, "devices": str(answer.cluster.world), "step": "no plan"}
    used, limit = (f"{found[name] / GIB:.3g}" for name in ("peak_bytes", "limit_bytes"))
    many = "tokens" if answer.tokens else "rows"
    per_s = found["tokens_per_s"] or found["rows_per_s"]
    price = f"{found['price_per_step'] / found['step_s'] / per_s * 1e6:.4g}" if found["price_per_step"] else ""
    return {
        column: answer.name,
        "devices": str(answer.cluster.world),
        "step": f"{found['step_s']:.3g} s",
        f"{many}/s": f"{per_s:,.0f}",
        "MFU": f"{found['mfu']:.1%}",
        "bubble": f"{answer.plan.outlook.bubble:.1%}",
        "memory GiB": f"{used} of {limit}",
        f"price of 1M {many}": price,
        "plan": _shape(answer.plan),
    }


def _shape(plan: Plan) -> str:
    """Return stages, replicas, the ranks of each of them, micro-batches and schedule in a few words."""
    widths = sorted({stage.replicas for stage in plan.stages})
    replicas = str(widths[0]) if len(widths) == 1 else f"{widths[0]}-{widths[-1]}"
    stages, micros, shards = len(plan.stages), len(plan.micro_rows), plan.decision.shards
    groups = f" x {shards} (tensor parallel)" if shards > 1 else ""
    many = f"{stages} stage{'s' * (stages > 1)} x {replicas}{groups}"
    return f"{many}, {micros} micro-batch{'es' * (micros > 1)}, {plan.schedule}"


def _facts(answer: Answer) -> dict[str, object]:
    facts: dict[str, object] = {"name": answer.name, "devices": answer.cluster.world}
    if answer.refused is not None:
        return facts | {"refused": str(answer.refused)}
    found, plan = answer.delivered(), answer.plan
    if found is None or plan is None:
        return facts
    return facts | found | {
        "bubble": plan.outlook.bubble,
        "stages": len(plan.stages),
        "replicas": [stage.replicas for stage in plan.stages],
        "tensor_parallel": plan.decision.shards,
        "micro_batches": len(plan.micro_rows),
        "schedule": plan.schedule,
    }  # fmt: skip
