"""What a plan would deliver: samples and tokens per second, model FLOPs utilisation (MFU), memory, and money.

MFU is the FLOPs of the model (`passes.ops.model_flops`) over those that all devices could do at their peak rates in the
time of a step.  The peak is that of the dtype of most of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a step of a plan delivers.

    step_s: seconds.  rows_per_s; tokens_per_s: 0 for batches without sequences.  flops: of the model in a step.  mfu:
    the share of the peak, 0 to 1.  peak_bytes, limit_bytes: of the device with the least room.  price_per_step: in the
    currency of the cluster file, 0 where it has no price.
    """

    step_s: float
    rows_per_s: float
    tokens_per_s: float
    flops: int
    mfu: float
    peak_bytes: int
    limit_bytes: int
    price_per_step: float

    @property
    def price_of_a_million(self) -> float:
        """Price of a million tokens, or of a million rows where there are no sequences."""
        per_s = self.tokens_per_s or self.rows_per_s
        return self.price_per_step / self.step_s / per_s * 1e6


def throughput(
    plan: Plan, graph: Graph, cluster: Cluster, tokens: int | None, by_dtype: Mapping[str, int]
) -> Throughput:
    """Return what a plan delivers on its cluster.

    graph: the captured graph of the plan.  tokens: of each sequence, None for other batches.  by_dtype: FLOPs of the
    model at the size of the graph (`model_flops`).  The plan has estimates.
    """
    seconds = plan.step_ns / 1e9
    rows = sum(plan.micro_rows)
    flops = sum(by_dtype.values()) * rows // graph.rows
    peak = sum(device.rate(max(by_dtype, key=by_dtype.__getitem__)) for device in cluster.devices)
    memory = [
        (cluster.least_memory_bytes(stage.ranks), estimate.peak_bytes)
        for stage, estimate in zip(plan.stages, plan.estimates, strict=True)
    ]
    limit_bytes, peak_bytes = min(memory, key=lambda each: each[0] - each[1])
    price = sum(device.price_per_hour for device in cluster.devices) / 3600 * seconds
    return Throughput(
        step_s=seconds,
        rows_per_s=rows / seconds,
        tokens_per_s=rows * (tokens or 0) / seconds,
        flops=flops,
        mfu=flops / (peak * seconds),
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        price_per_step=price,
    )
