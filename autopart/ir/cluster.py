"""The machines: devices and the links between them.  The index of a device is its rank.

Levels nest: a level joins groups, each of as many consecutive ranks as the level inside it has (single devices at the
innermost level).  The link of a level is the PORT of one such group: a device's share of NVLink, then a node's network
card, and so on.  All that leaves a group towards other groups of the level shares that port, and so does all that
enters it; the two directions do not disturb each other.  Where a port is of several network cards, a device has one of
them: all that it sends, or receives, at that level shares the card (`flow_bytes_per_s`), beside the port.

A message uses two ports, those of the level that joins its two ranks: the sender's outwards, the receiver's inwards.
It takes no time on the ports of the levels inside (the network card reads device memory without passing NVLink) and
meets no other message between the ports (the switch is never the bottleneck).  Wrong where GPUs share a PCIe lane with
the network card, and where the outer network is oversubscribed: give that a level of its own.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopart.ir.errors import ClusterError
from autopart.ir.printable import shortened

Port = tuple[int, int]
"""(index of the level, number of the group inside it)."""
_DTYPE = re.compile(r"b?float16|float(32|64)|float[48]_\w{1,20}|u?int(8|16|32|64)|complex(32|64|128)")


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    kind: "cpu" or "cuda".  memory_bytes: what a plan may use.  flops_per_s: peak rate of dtypes that `rates` does not
    list.  mem_bytes_per_s: memory bandwidth.  name: what people call it, "H200".  rates: (dtype as in `Value.dtype`,
    peak rate).  efficiency, memory_efficiency: the shares of peak rates and of the bandwidth that kernels reach.
    """

    kind: str
    memory_bytes: int
    flops_per_s: int
    mem_bytes_per_s: int
    name: str = ""
    rates: tuple[tuple[str, int], ...] = ()
    efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def reached(self, dtype: str) -> int:
        """Operations per second that kernels reach on operands of this dtype."""
        return max(1, int(self.rate(dtype) * self.efficiency))

    @property
    def reached_bytes_per_s(self) -> int:
        """Bytes of memory per second that kernels reach."""
        return max(1, int(self.mem_bytes_per_s * self.memory_efficiency))

    def rate(self, dtype: str) -> int:
        """Peak operations per second on operands of this dtype."""
        return next((rate for name, rate in self.rates if name == dtype), self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Link:
    """A port: a message of n bytes that has it for itself takes latency_ns + n / bytes_per_s seconds.

    flow_bytes_per_s: what a single device gets of it, where the port is of several network cards; 0: all of it.
    """

    latency_ns: int
    bytes_per_s: int
    flow_bytes_per_s: int = 0

    def transfer_ns(self, size_bytes: int) -> int:
        """Nanoseconds for one message of size_bytes."""
        return self.latency_ns + -(-size_bytes * 1_000_000_000 // (self.flow_bytes_per_s or self.bytes_per_s))


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of `size` consecutive ranks; `link` is the port of each group of the level inside."""

    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices (index = rank) and nested levels, each a multiple of the one before; the last spans all devices."""

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]

    def level(self, a: int, b: int) -> int:
        """Index of the innermost level that holds both ranks."""
        for index, level in enumerate(self.levels):
            if a // level.size == b // level.size:
                return index
        return len(self.levels) - 1

    def link(self, a: int, b: int) -> Link:
        """The link of the innermost level that holds both ranks."""
        return self.levels[self.level(a, b)].link

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """The port that a message from a to b leaves by, and the one that it enters by."""
        index = self.level(a, b)
        inner = self.levels[index - 1].size if index else 1
        return (index, a // inner), (index, b // inner)

    def least_memory_bytes(self, ranks: tuple[int, ...]) -> int:
        """Bytes that a plan may use on every one of these ranks."""
        return min([self.devices[rank].memory_bytes for rank in ranks])

    def with_less_memory(self, size_bytes: int) -> Cluster:
        """The same machines, each with so much less memory."""
        less = {d: replace(d, memory_bytes=max(1, d.memory_bytes - size_bytes)) for d in dict.fromkeys(self.devices)}
        return replace(self, devices=tuple(less[device] for device in self.devices))

    @property
    def world(self) -> int:
        """Number of devices, which is the number of ranks."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """ "cuda" when any device is one, else "cpu"."""
        return "cuda" if any(d.kind == "cuda" for d in self.devices) else "cpu"


def check(cluster: Cluster) -> Cluster:
    """At least one device, positive rates of dtypes, levels that nest and the last of which spans all devices."""
    if not cluster.devices:
        raise ClusterError("the cluster has no devices", fix='name at least one, for example "cpu:2"')
    for rank, device in enumerate(cluster.devices):
        if rank == 0 or device is not cluster.devices[rank - 1]:  # equal neighbours mostly are one object
            _check_device(rank, device)
    if len({d.kind for d in cluster.devices}) > 1:
        raise ClusterError("the cluster mixes cpu and cuda devices", fix="use one kind")
    _check_levels(cluster)
    return cluster


def _check_levels(cluster: Cluster) -> None:
    if not cluster.levels:
        raise ClusterError("the cluster has no links", fix="give at least one level")
    size = 1
    for level in cluster.levels:
        if level.size < size or level.size % size:
            raise ClusterError(f"level of size {level.size} is not a multiple of the level inside it ({size})")
        link = level.link
        _check_whole(repr(level), bytes_per_s=link.bytes_per_s, latency_ns=link.latency_ns, flow=link.flow_bytes_per_s)
        if link.bytes_per_s <= 0 or link.latency_ns < 0 or link.flow_bytes_per_s < 0:
            raise ClusterError("a link needs a positive bandwidth and a latency of at least 0", where=repr(level))
        size = level.size
    if size >= 2 * cluster.world:  # less is a machine in which the last group is not full
        raise ClusterError(f"the outermost level is of {size} devices, and the cluster has {cluster.world}")
    if size < cluster.world:
        raise ClusterError(f"the outermost level joins {size} devices of {cluster.world}")


def _check_device(rank: int, device: Device) -> None:
    if device.kind not in ("cpu", "cuda"):
        raise ClusterError(f"device {rank} is of unknown kind {device.kind!r}", fix='use "cpu" or "cuda"')
    sizes = {"memory_bytes": device.memory_bytes, "flops_per_s": device.flops_per_s}
    rates = {f"rate for {shortened(str(name))}": rate for name, rate in device.rates}
    _check_whole(_described(device), **sizes, mem_bytes_per_s=device.mem_bytes_per_s, **rates)
    if min(device.memory_bytes, device.flops_per_s, device.mem_bytes_per_s) <= 0:
        raise ClusterError(f"device {rank} has a rate or a memory that is not positive", where=_described(device))
    if not (0 < device.efficiency <= 1 and 0 < device.memory_efficiency <= 1):
        raise ClusterError(f"device {rank}: efficiency must be between 0 and 1", where=_described(device))
    if not device.name.isprintable() or len(device.name) > 100:
        raise ClusterError(f"the name of device {rank} is not printable, or longer than 100", where=_described(device))
    _check_rates(rank, device)


def _check_whole(where: str, **amounts: int) -> None:
    """Raise ClusterError for an amount that is not a whole number: NaN, infinite or any other float."""
    for name, amount in amounts.items():
        if type(amount) is not int:
            raise ClusterError(
                f"{name} is {amount!r}, which is not a whole number",
                where=shortened(where, 300),
                fix="give whole numbers of bytes, nanoseconds and operations, for example int(2e12)",
            )


def _described(device: Device) -> str:
    return shortened(repr(device), 300)


def _check_rates(rank: int, device: Device) -> None:
    seen: set[str] = set()
    for name, rate in device.rates:
        if not _DTYPE.fullmatch(name):
            raise ClusterError(
                f"device {rank} has a rate for {shortened(name)!r}, which is not a dtype",
                fix='write it as torch does, without "torch.": "bfloat16", "float16", "float32", "float64"',
            )
        if rate <= 0:
            raise ClusterError(f"device {rank} has a rate for {name} that is not positive", where=_described(device))
        if name in seen:
            raise ClusterError(f"device {rank} has two rates for {name}", where=_described(device))
        seen.add(name)


def torchrun_line(world: int, local: int | None = None, argv: Sequence[str] | None = None) -> str:
    """The command that runs a script on `world` ranks, `local` of them on each host, None for all on this one.

    argv: the script's command line, by default this process's.  Over several hosts it is run on each of them.
    """
    if local is None or local >= world:
        return f"torchrun --standalone --nproc-per-node {world} {script_line(argv)}"
    return (
        f"torchrun --nnodes {-(-world // local)} --nproc-per-node {local} --rdzv-backend c10d "
        f"--rdzv-endpoint $MASTER_ADDR:29500 {script_line(argv)}"
    )


def script_line(argv: Sequence[str] | None = None) -> str:
    """A script and its arguments as typed; by default this process's."""
    return shlex.join([word for word in (sys.argv if argv is None else argv) if word] or ["train.py"])
