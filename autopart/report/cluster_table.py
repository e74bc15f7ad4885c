"""Draw a cluster as two tables: its devices, and the levels of links between them."""

from __future__ import annotations

import itertools

from autopart.ir.cluster import UNMEASURED, Cluster, Device, Level
from autopart.report.plan_table import table_lines

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def cluster_table(cluster: Cluster) -> str:
    """Return the tables.  Equal neighbours are one line; reached: shares of peak rates and of memory bandwidth."""
    dtypes = list(dict.fromkeys(name for device in cluster.devices for name, _ in device.rates))
    heads = [f"{_SHORT.get(name, name)} TFLOP/s" for name in dtypes]
    grid = [["ranks", "device", "memory GiB", *heads, "other TFLOP/s" if dtypes else "TFLOP/s", "memory GB/s"]]
    reached = any((device.efficiency, device.memory_efficiency) != (1.0, 1.0) for device in cluster.devices)
    grid[0] += ["reached"] if reached else []
    rank = 0
    for device, same in itertools.groupby(cluster.devices):
        count = len(list(same))
        grid.append(_device_row(rank, count, device, dtypes, reached))
        rank += count
    cards = any(level.link.flow_bytes_per_s for level in cluster.levels)
    links = [["level", "joins", "latency us", "GB/s of a port", *(["GB/s of a device"] if cards else [])]]
    inner = 1
    for index, level in enumerate(cluster.levels):
        links.append(_level_row(index, level, inner, cards))
        inner = level.size
    lines = [*table_lines(grid, (0, 1)), "", *table_lines(links, (0, 1))]
    if (host := cluster.host) != UNMEASURED:
        spent = {"compute": host.compute_ns, "message": host.message_ns, "sum": host.sum_ns, "step": host.step_ns}
        lines += ["", " host: " + ", ".join(f"{ns / 1000:.4g} us a {what}" for what, ns in spent.items())]
    return "\n".join(lines) + "\n"


def _device_row(rank: int, count: int, device: Device, dtypes: list[str], reached: bool) -> list[str]:
    ranks = str(rank) if count == 1 else f"{rank}-{rank + count - 1}"
    rates = [device.rate(name) for name in dtypes] + [device.flops_per_s]
    memory = f"{device.memory_bytes / 2**30:.1f}"
    bandwidth = f"{device.mem_bytes_per_s / 1e9:.4g}"
    shares = [f"{device.efficiency:.0%}, {device.memory_efficiency:.0%}"] if reached else []
    return [ranks, device.name or device.kind, memory, *(f"{rate / 1e12:.4g}" for rate in rates), bandwidth, *shares]


def _level_row(index: int, level: Level, inner: int, cards: bool) -> list[str]:
    parts = max(1, level.size // inner)
    joins = f"{parts} device{'s' * (parts > 1)}" if index == 0 else f"{parts} groups of {inner}"
    link = level.link
    flow = [f"{(link.flow_bytes_per_s or link.bytes_per_s) / 1e9:.4g}"] if cards else []
    return [str(index), joins, f"{link.latency_ns / 1000:.4g}", f"{link.bytes_per_s / 1e9:.4g}", *flow]
