"""Draw a cluster as two tables: its devices, and the levels of links between them."""

from __future__ import annotations

import itertools

from autopart.ir.cluster import UNMEASURED, Cluster
from autopart.ir.errors import shortened
from autopart.report.plan_table import table_lines

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def cluster_table(cluster: Cluster) -> str:
    """Return the tables.  Equal neighbours are one line; reached: shares of peak rates and of memory bandwidth."""
    dtypes = list(dict.fromkeys(name for device in cluster.devices for name, _ in device.rates))
    reached = any((device.efficiency, device.memory_efficiency) != (1.0, 1.0) for device in cluster.devices)
    cards = any(level.link.flow_bytes_per_s for level in cluster.levels)
    devices, levels, rank, inner = [], [], 0, 1
    for device, same in itertools.groupby(cluster.devices):
        count = len(list(same))
        row = {"ranks": str(rank) if count == 1 else f"{rank}-{rank + count - 1}", "device": device.name or device.kind}
        row["memory GiB"] = f"{device.memory_bytes / 2**30:.1f}"
        row |= {f"{_SHORT.get(name, name)} TFLOP/s": f"{device.rate(name) / 1e12:.4g}" for name in dtypes}
        row["other TFLOP/s" if dtypes else "TFLOP/s"] = f"{device.flops_per_s / 1e12:.4g}"
        row["memory GB/s"] = f"{device.mem_bytes_per_s / 1e9:.4g}"
        row |= {"reached": f"{device.efficiency:.0%}, {device.memory_efficiency:.0%}"} if reached else {}
        devices.append(row)
        rank += count
    for index, level in enumerate(cluster.levels):
        parts, link = max(1, level.size // inner), level.link
        joins = f"{parts} device{'s' * (parts > 1)}" if index == 0 else f"{parts} groups of {inner}"
        if level.groups or (index and cluster.levels[index - 1].groups):
            sizes = level.groups or cluster.levels[index - 1].groups
            joins = shortened(f"{', '.join(map(str, sizes))} devices" + " each" * bool(level.groups), 40)
        row = {"level": str(index), "joins": joins, "latency us": f"{link.latency_ns / 1000:.4g}"}
        row["GB/s of a port"] = f"{link.bytes_per_s / 1e9:.4g}"
        row |= {"GB/s of a device": f"{(link.flow_bytes_per_s or link.bytes_per_s) / 1e9:.4g}"} if cards else {}
        levels.append(row)
        inner = level.size
    tables = [table_lines([list(rows[0]), *(list(row.values()) for row in rows)], (0, 1)) for rows in (devices, levels)]
    lines = [*tables[0], "", *tables[1]]
    if (host := cluster.host) != UNMEASURED:
        spent = {"compute": host.compute_ns, "message": host.message_ns, "sum": host.sum_ns, "step": host.step_ns}
        lines += ["", " host: " + ", ".join(f"{ns / 1000:.4g} us a {what}" for what, ns in spent.items())]
    return "\n".join(lines) + "\n"
