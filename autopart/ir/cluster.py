"""The machines: devices and the links between them.  The index of a device is its rank."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ClusterError


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    kind: "cpu" or "cuda".  memory_bytes: what a plan may use.  flops_per_s: peak rate of the dtype that the model
    uses.  mem_bytes_per_s: memory bandwidth.
    """

    kind: str
    memory_bytes: int
    flops_per_s: int
    mem_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Link:
    """A directed connection: a message of n bytes takes latency_ns + n / bytes_per_s seconds."""

    latency_ns: int
    bytes_per_s: int

    def transfer_ns(self, size_bytes: int) -> int:
        """Nanoseconds for one message of size_bytes."""
        return self.latency_ns + -(-size_bytes * 1_000_000_000 // self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of `size` consecutive ranks joined by `link`; the innermost level comes first."""

    size: int
    link: Link


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices (index = rank) and nested levels, each a multiple of the one before; the last spans all devices."""

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]

    def link(self, a: int, b: int) -> Link:
        """The link of the innermost level that holds both ranks."""
        for level in self.levels:
            if a // level.size == b // level.size:
                return level.link
        return self.levels[-1].link

    @property
    def world(self) -> int:
        """Number of devices, which is the number of ranks."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """ "cuda" when any device is one, else "cpu"."""
        return "cuda" if any(d.kind == "cuda" for d in self.devices) else "cpu"


def check(cluster: Cluster) -> Cluster:
    """At least one device, positive rates, levels that nest and the last of which spans all devices."""
    if not cluster.devices:
        raise ClusterError("the cluster has no devices", fix='name at least one, for example "cpu:2"')
    for rank, device in enumerate(cluster.devices):
        if device.kind not in ("cpu", "cuda"):
            raise ClusterError(f"device {rank} is of unknown kind {device.kind!r}", fix='use "cpu" or "cuda"')
        if min(device.memory_bytes, device.flops_per_s, device.mem_bytes_per_s) <= 0:
            raise ClusterError(f"device {rank} has a rate or a memory that is not positive", where=repr(device))
    if len({d.kind for d in cluster.devices}) > 1:
        raise ClusterError("the cluster mixes cpu and cuda devices", fix="use one kind")
    if not cluster.levels:
        raise ClusterError("the cluster has no links", fix="give at least one level")
    size = 1
    for level in cluster.levels:
        if level.size < size or level.size % size:
            raise ClusterError(f"level of size {level.size} is not a multiple of the level inside it ({size})")
        if level.link.bytes_per_s <= 0 or level.link.latency_ns < 0:
            raise ClusterError("a link needs a positive bandwidth and a latency of at least 0", where=repr(level))
        size = level.size
    if size < cluster.world:
        raise ClusterError(f"the outermost level joins {size} devices of {cluster.world}")
    return cluster


def torchrun_line(world: int, argv: Sequence[str] | None = None) -> str:
    """The command that runs a script on `world` local ranks; argv: its command line, by default this process's."""
    words = [word for word in (sys.argv if argv is None else argv) if word] or ["train.py"]
    return f"torchrun --standalone --nproc-per-node {world} {shlex.join(words)}"
