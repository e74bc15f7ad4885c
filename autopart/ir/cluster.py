"""The machines: kinds of devices, devices, and the links between them.  The index of a device is its rank.

Levels nest: a level joins groups of consecutive ranks, those of the level inside it (single devices at the innermost
level), which have one size, or sizes of their own: hosts of 1 and 4 devices.  The link of a level is the port of one
such group: a device's share of NVLink, then the network card of a node, and so on.  All traffic that leaves a group
towards other groups of the level shares that port, and so does all traffic that enters it; the two directions are
independent.  If a port consists of several network cards, each device uses one of them: what it sends, or receives, at
that level also shares that card (`flow_bytes_per_s`).

A message uses two ports, those of the level that joins its two ranks: outwards the sender's, inwards the receiver's.
It takes no time on the ports of inner levels (the network card reads device memory without passing NVLink) and meets
no other message between the ports (the switch is never the bottleneck).  This is wrong where GPUs share a PCIe lane
with the network card, and where the outer network is oversubscribed: describe that as a level of its own.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby

from autopart.ir.errors import ClusterError, shortened

Port = tuple[int, int]
"""(index of the level, number of the group inside it)."""
_DTYPE = re.compile(
    r"b?float16|float(32|64)|float8_(e4m3fn(uz)?|e5m2(fnuz)?|e8m0fnu)|float4_e2m1fn_x2|u?int(8|16|32|64)"
    r"|complex(32|64|128)"
)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device.  Times are orders of magnitude, in nanoseconds.

    beside: whether messages, sums of gradients and reads of weights pass beside its computes; else the cores that
    compute make them.  launch_ns: to dispatch the forward of an op from Python.  slice_ns: of an op, however short the
    slice of tokens is, autograd included.  compute_ns: by which each further compute of a rank has to shorten the step:
    to begin it, and to post its messages, is left out by the simulation.  group_ns: overhead of a recomputed group in
    autograd and Python.  state_passes: how often a tensor of an optimizer's state costs a pass over memory as large as
    the parameters.  units: tiles of products that it computes at a time, 0 where products are not made of tiles.
    transport: by which its ranks exchange messages, unless the user asks for another.  device_type:
    torch's `device.type`.

    Where nothing else is known.  own: memory in bytes, FLOP/s and memory bytes/s of a device; None where devices are
    shares of their host.  link: latency in nanoseconds and bytes/s between the devices of a host, of which there are at
    most `of_host`, None for any number.

    What plans leave of the memory to all that is not charged (`reserve`), orders of magnitude.  context_bytes: of the
    process or the driver, with loaded kernels and workspaces of libraries; at most an eighth of the memory.
    fragmented: the share that an allocator wastes.  Charged besides: peer_bytes, a connection to a rank that messages
    are exchanged with, and group_bytes, a group that sums gradients.

    What `detect` measures.  dtypes: rates of products.  message_bytes: times of messages, the smallest for the latency.
    product_rows: of the largest product.  copied_bytes: of the copy that shows the memory bandwidth, more than caches.
    """

    beside: bool
    launch_ns: int
    slice_ns: int
    compute_ns: int
    group_ns: int
    state_passes: float
    units: int
    transport: str
    device_type: str
    own: tuple[int, int, int] | None
    link: tuple[int, int]
    of_host: int | None
    context_bytes: int
    fragmented: float
    peer_bytes: int
    group_bytes: int
    dtypes: tuple[str, ...]
    message_bytes: tuple[int, ...]
    product_rows: int
    copied_bytes: int

    def reserve(self, memory_bytes: int) -> int:
        """Return the bytes of a device with so much memory that plans do not use, unless a cluster file says."""
        return min(self.context_bytes, memory_bytes // 8) + int(self.fragmented * memory_bytes)


DEVICE_KINDS: Mapping[str, DeviceKind] = {
    "cpu": DeviceKind(
        beside=False,
        launch_ns=3_000,
        slice_ns=15_000,
        compute_ns=300_000,
        group_ns=50_000,  # measured around groups of one small op
        state_passes=8.5,  # torch's optimizers run op by op: 20 passes for AdamW, 11 for SGD with momentum and decay
        units=0,
        transport="gloo",
        device_type="cpu",
        own=None,
        link=(20_000, 2 * 10**9),  # TCP between processes
        of_host=None,
        context_bytes=366 << 20,  # measured: resident memory of a rank of a tiny model after a step
        fragmented=0.0,  # large tensors are given back to the system
        peer_bytes=0,
        group_bytes=0,
        dtypes=("float32", "bfloat16"),
        message_bytes=(64, 2**18, 2**20, 2**22, 2**24),
        product_rows=4096,
        copied_bytes=2**26,
    ),
    "cuda": DeviceKind(
        beside=True,
        launch_ns=6_000,
        slice_ns=10_000,
        compute_ns=30_000,
        group_ns=0,  # the host runs ahead
        state_passes=2.0,  # a step is one kernel, which reads and writes each once
        units=108,  # multiprocessors of A100; 132 of H100
        transport="nccl",
        device_type="cuda",
        own=(80 * 2**30, 10**14, 2 * 10**12),  # bf16 at what models reach
        link=(10_000, 2 * 10**11),  # NVLink
        of_host=8,
        context_bytes=640 << 20,  # context and kernels half a GiB; workspaces of matrix products 64 MiB and more
        fragmented=0.06,
        peer_bytes=16 << 20,  # NCCL: 4 MiB for each of two channels, both ways
        group_bytes=128 << 20,  # 16 channels
        dtypes=("float32", "bfloat16", "float16"),
        message_bytes=(64, 2**20, 2**22, 2**24, 2**26),
        product_rows=8192,
        copied_bytes=2**29,
    ),
}
"""The kinds by name.  A new kind is a row here; a transport of its own is an entry of `CARRIERS`."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    kind: a row of `DEVICE_KINDS`.  memory_bytes: memory that a plan may use.  flops_per_s: peak rate for dtypes that
    `rates` does not list.  mem_bytes_per_s: memory bandwidth.  name: product name, such as "H200".  rates: (dtype as in
    `Value.dtype`, peak rate).  efficiency, memory_efficiency: shares of peak rates and of the memory bandwidth that
    kernels reach.  reserve_bytes: of the memory, what no plan uses: all that is not charged, such as the context of a
    driver.  price_per_hour: in any currency, 0 if it is not known; no plan depends on it.
    """

    kind: str
    memory_bytes: int
    flops_per_s: int
    mem_bytes_per_s: int
    name: str = ""
    rates: tuple[tuple[str, int], ...] = ()
    efficiency: float = 1.0
    memory_efficiency: float = 1.0
    reserve_bytes: int = 0
    price_per_hour: float = field(default=0.0, repr=False)  # a kept plan is found by the repr of its cluster

    @property
    def device_type(self) -> str:
        """Torch's `device.type` of this device."""
        return DEVICE_KINDS[self.kind].device_type

    def reached(self, dtype: str) -> int:
        """Return the operations per second that kernels reach on operands of this dtype."""
        return max(1, int(self.rate(dtype) * self.efficiency))

    @property
    def reached_bytes_per_s(self) -> int:
        """Bytes of memory per second that kernels reach."""
        return max(1, int(self.mem_bytes_per_s * self.memory_efficiency))

    def rate(self, dtype: str) -> int:
        """Return the peak operations per second on operands of this dtype."""
        return next((rate for name, rate in self.rates if name == dtype), self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Link:
    """A port: a message of n bytes that has it for itself takes latency_ns + n / bytes_per_s seconds.

    flow_bytes_per_s: the part that a single device can use, if the port consists of several network cards; 0: all.
    """

    latency_ns: int
    bytes_per_s: int
    flow_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the network: groups of `size` consecutive ranks, joined through ports of kind `link`.

    Each group of the level inside it has one such port.  groups: the sizes of all groups, in order of rank, where they
    differ; `size` is then the largest.
    """

    size: int
    link: Link
    groups: tuple[int, ...] = ()

    def group(self, rank: int) -> int:
        """Return the number of the group of a rank."""
        return bisect_right(tuple(accumulate(self.groups)), rank) if self.groups else rank // self.size


@dataclass(frozen=True, slots=True)
class HostCosts:
    """What the host of a rank spends on a step besides its ops, in nanoseconds; 0 where it was not measured.

    compute_ns: on each forward or backward of a micro-batch.  message_ns: on each end of a message.  sum_ns: on each
    bucket of gradients that replicas sum.  step_ns: once a step: the batch is read and compared, and all ranks agree.
    """

    compute_ns: int = 0
    message_ns: int = 0
    sum_ns: int = 0
    step_ns: int = 0


UNMEASURED = HostCosts()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices (index = rank) and nested levels, innermost first.

    Each group of a level consists of whole groups of the level before it; the last level spans all devices.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    host: HostCosts = UNMEASURED

    def level(self, a: int, b: int) -> int:
        """Return the index of the innermost level that holds both ranks."""
        for index, level in enumerate(self.levels):
            if level.group(a) == level.group(b):
                return index
        return len(self.levels) - 1

    def link(self, a: int, b: int) -> Link:
        """Return the link of the innermost level that holds both ranks."""
        return self.levels[self.level(a, b)].link

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """Return the port by which a message from a to b leaves, and the one by which it arrives."""
        index = self.level(a, b)
        if not index:
            return (0, a), (0, b)
        inner = self.levels[index - 1]
        return (index, inner.group(a)), (index, inner.group(b))

    def least_memory_bytes(self, ranks: tuple[int, ...]) -> int:
        """Return the bytes that a plan may use on every one of these ranks."""
        return min([self.devices[rank].memory_bytes - self.devices[rank].reserve_bytes for rank in ranks])

    def with_less_memory(self, size_bytes: int) -> Cluster:
        """Return a copy in which each device has size_bytes less memory."""
        less = {
            d: replace(d, memory_bytes=max(d.reserve_bytes + 1, d.memory_bytes - size_bytes))
            for d in dict.fromkeys(self.devices)
        }
        return replace(self, devices=tuple(less[device] for device in self.devices))

    def with_speeds(self, speeds: Sequence[float]) -> Cluster:
        """Return a copy with the speed of each device, and of its memory, multiplied by these factors."""

        def changed(device: Device, speed: float) -> Device:
            rates = tuple((dtype, max(1, int(rate * speed))) for dtype, rate in device.rates)
            flops, memory = (max(1, int(rate * speed)) for rate in (device.flops_per_s, device.mem_bytes_per_s))
            return replace(device, flops_per_s=flops, mem_bytes_per_s=memory, rates=rates)

        devices = zip(self.devices, speeds, strict=True)
        return replace(self, devices=tuple(d if speed == 1.0 else changed(d, speed) for d, speed in devices))

    def part(self, devices: Sequence[int]) -> Cluster:
        """Return the cluster of some of these devices; their order gives the new ranks.

        A level stays where its groups lost equally many devices, the last one perhaps more.  Else it is dropped with
        those inside it, and messages there count as messages over the slower links around it."""
        levels: list[Level] = []
        for level in self.levels:
            groups = [len(list(same)) for _, same in groupby(map(level.group, devices))]
            inner = levels[-1].size if levels else 1
            size = -(-groups[0] // inner) * inner
            if all(count == size for count in groups[:-1]) and groups[-1] <= size:
                levels.append(Level(size, level.link))
            else:
                levels.clear()
        return replace(self, devices=tuple(self.devices[device] for device in devices), levels=tuple(levels))

    @property
    def world(self) -> int:
        """Number of devices, which is the number of ranks."""
        return len(self.devices)

    @property
    def types(self) -> dict[Device, int]:
        """Each kind of device and how many there are, the one of rank 0 first.  Equal ones mostly are one object."""
        objects = {id(device): device for device in self.devices}
        found = dict.fromkeys(objects.values(), 0)
        for key, count in Counter(map(id, self.devices)).items():
            found[objects[key]] += count
        return found

    @property
    def kind(self) -> str:
        """Kind of the devices, which all have one."""
        return self.devices[0].kind


def check(cluster: Cluster) -> Cluster:
    """Check devices, rates and levels, and return the cluster.  Raises ClusterError."""
    if not cluster.devices:
        raise ClusterError("the cluster has no devices", fix='name at least one, for example "cpu:2"')
    for rank, device in enumerate(cluster.devices):
        if rank == 0 or device is not cluster.devices[rank - 1]:  # equal neighbours mostly are one object
            _check_device(rank, device)
    if len(kinds := sorted({d.kind for d in cluster.devices})) > 1:
        raise ClusterError(f"the cluster mixes {' and '.join(kinds)} devices", fix="use one kind")
    if not cluster.levels:
        raise ClusterError("the cluster has no links", fix="give at least one level")
    size, inner = 1, Level(1, cluster.levels[0].link)
    for level in cluster.levels:
        _check_groups(level, inner, cluster.world)
        if not (level.groups or inner.groups) and (level.size < size or level.size % size):
            raise ClusterError(f"level of size {level.size} is not a multiple of the level inside it ({size})")
        link = level.link
        _check_whole(level, **asdict(link))
        if link.bytes_per_s <= 0 or link.latency_ns < 0 or link.flow_bytes_per_s < 0:
            raise ClusterError("a link needs a positive bandwidth and a latency of at least 0", where=repr(level))
        size, inner = level.size, level
    if not cluster.world <= size < 2 * cluster.world:  # the last group need not be full
        raise ClusterError(f"the outermost level has {size} devices, and the cluster has {cluster.world}")
    _check_whole(cluster.host, **asdict(cluster.host))
    if min(asdict(cluster.host).values()) < 0:
        raise ClusterError("a host spends a negative time", where=repr(cluster.host))
    return cluster


def _check_groups(level: Level, inner: Level, world: int) -> None:
    """Raise ClusterError for sizes of groups that do not add up, or that cut groups of the level inside."""
    if level.groups and (min(level.groups) < 1 or sum(level.groups) != world or max(level.groups) != level.size):
        sizes = shortened(", ".join(map(str, level.groups)), 100)
        raise ClusterError(
            f"groups of {sizes} devices, and the cluster has {world}",
            why="the groups of a level hold all devices, and its size is that of the largest",
        )
    if not (level.groups or inner.groups):
        return
    cut = [r for r in range(1, world) if level.group(r - 1) != level.group(r) and inner.group(r - 1) == inner.group(r)]
    if cut:
        raise ClusterError(
            f"a level divides devices {cut[0] - 1} and {cut[0]}, which one group of the level inside it holds",
            fix="give levels innermost first, each of whole groups of the one before",
        )


def _check_device(rank: int, device: Device) -> None:
    def fail(what: str, fix: str = "") -> ClusterError:
        return ClusterError(f"device {rank} {what}", where=shortened(repr(device), 300), fix=fix)

    if device.kind not in DEVICE_KINDS:
        raise fail(f"is of unknown kind {device.kind!r}", "use " + " or ".join(f'"{kind}"' for kind in DEVICE_KINDS))
    if not device.name.isprintable() or len(device.name) > 100:
        raise fail("has a name that is not printable, or longer than 100 characters")
    seen: set[str] = set()
    for name, _ in device.rates:
        if not _DTYPE.fullmatch(name):
            fix = 'write it as torch does, without "torch.": "bfloat16", "float16", "float32", "float64"'
            raise fail(f"has a rate for {shortened(name)!r}, which is not a dtype", fix)
        if name in seen:
            raise fail(f"has two rates for {name}")
        seen.add(name)
    amounts = {name: getattr(device, name) for name in ("memory_bytes", "flops_per_s", "mem_bytes_per_s")}
    amounts |= {f"rate for {name}": rate for name, rate in device.rates}
    _check_whole(device, **amounts)
    for name, amount in amounts.items():
        if amount <= 0:
            raise fail(f"has a {name} that is not positive")
    if not (0 < device.efficiency <= 1 and 0 < device.memory_efficiency <= 1):
        raise fail("has an efficiency that is not between 0 and 1")
    if type(device.reserve_bytes) is not int or not 0 <= device.reserve_bytes < device.memory_bytes:
        raise fail(
            f"reserves {device.reserve_bytes} bytes, which leaves nothing of its memory, or is not a number of bytes"
        )
    if not 0 <= device.price_per_hour < math.inf:
        raise fail("has a price that is not a number of at least 0")


def _check_whole(where: object, **amounts: int) -> None:
    """Raise ClusterError for an amount that is not a whole number: NaN, infinite or any other float."""
    for name, amount in amounts.items():
        if type(amount) is not int:
            raise ClusterError(
                f"{name} is {amount!r}, which is not a whole number",
                where=shortened(repr(where), 300),
                fix="give whole numbers of bytes, nanoseconds and operations, for example int(2e12)",
            )
