"""Machines by name: "h200x8" is a node of eight, "h200x8:4" four of them.

Rates are from the makers' data sheets: dense (no sparsity), of the tensor cores if PyTorch uses them by default
(float16, bfloat16, float64 from A100 on; not float32, since TF32 is off).  V100 has no bfloat16, which runs as float32.
A gigabyte is read as 10^9 bytes, some 6 % less than the driver reports, which goes to the context and to
fragmentation.  Bandwidths are of one direction.  Latencies are not in data sheets; they are of the order that NCCL
shows for one small message.

`REACHED` is the assumed share of peak rates that kernels reach.  The network is the port of a whole node, with all its
cards; one device uses one of them (an eighth, or a quarter on V100 nodes).  Within V100 nodes two devices share at most
two of the six links, a third of the port.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.cluster import Cluster, Device, Level, Link

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Node:
    """A node of `count` equal devices.

    inside: the port of one device to the others.  network: the port of the node.
    """

    device: Device
    count: int
    inside: Link
    network: Link


REACHED, MEMORY_REACHED = 0.55, 0.85
"""Assumed shares of peak rates for matrix products, and of memory bandwidth for other ops, in a training step.

Products: Llama 3 ("The Llama 3 Herd of Models", 2024, table 4) trained at 38 to 43 % of the peak of H100s, bubbles
and messages included, and Megatron-LM at 44 to 52 % of that of A100s ("Efficient Large-Scale Language Model
Training on GPU Clusters", SC 2021, table 1), so that kernels alone reached some 50 to 60 %.  Memory: about what
copies and elementwise kernels of large tensors reach on all of these devices."""


def _cuda(name: str, memory: int, bandwidth: int, half: int, brain: int, single: int, double: int) -> Device:
    """Make a GPU.  memory in GB, bandwidth in GB/s, rates in units of 10^11 FLOP/s (0.1 TFLOP/s)."""
    rates = {"float16": half, "bfloat16": brain, "float32": single, "float64": double}
    unit = TERA // 10
    return Device(
        "cuda",
        memory * GB,
        single * unit,
        bandwidth * GB,
        name,
        tuple((d, r * unit) for d, r in rates.items()),
        REACHED,
        MEMORY_REACHED,
    )


DEVICES = {
    device.name: device
    for device in (
        _cuda("H200", 141, 4800, 9895, 9895, 670, 670),  # SXM
        _cuda("H100", 80, 3350, 9895, 9895, 670, 670),  # SXM
        _cuda("A100", 80, 2039, 3120, 3120, 195, 195),  # SXM, 80 GB
        _cuda("V100", 32, 900, 1250, 157, 157, 78),  # SXM2, 32 GB
        _cuda("V100-16GB", 16, 900, 1250, 157, 157, 78),  # SXM2
    )
}

NODES = {
    # network cards: 8 x 400 Gb/s (DGX H200, H100), 8 x 200 Gb/s (DGX A100), 4 x 100 Gb/s (DGX-1), 25 Gb/s over TCP
    "h200x8": Node(DEVICES["H200"], 8, Link(10_000, 450 * GB), Link(20_000, 400 * GB, 50 * GB)),
    "h100x8": Node(DEVICES["H100"], 8, Link(10_000, 450 * GB), Link(20_000, 400 * GB, 50 * GB)),
    "a100x8": Node(DEVICES["A100"], 8, Link(10_000, 300 * GB), Link(20_000, 200 * GB, 25 * GB)),
    "v100x8": Node(DEVICES["V100"], 8, Link(10_000, 150 * GB), Link(20_000, 50 * GB, 50 * GB // 4)),
    "p3.16xlarge": Node(DEVICES["V100-16GB"], 8, Link(10_000, 150 * GB), Link(50_000, 25 * GB // 8)),
}


def several(node: Node, count: int) -> Cluster:
    """Return a cluster of `count` nodes in one network."""
    outer = (Level(node.count * count, node.network),) if count > 1 else ()
    return Cluster((node.device,) * (node.count * count), (Level(node.count, node.inside), *outer))
