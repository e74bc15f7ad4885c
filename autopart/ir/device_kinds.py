"""The kinds of devices, a row for each: everything that depends on the kind alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device.  Times are orders of magnitude, in nanoseconds.

    beside: whether messages, sums of gradients and reads of weights pass beside its computes; else the cores that
    compute make them.  launch_ns: to dispatch the forward of an op from Python.  slice_ns: of an op, however short the
    slice of tokens is, autograd included.  compute_ns: by which each further compute of a rank has to shorten the step:
    to begin it, and to post its messages, is left out by the simulation.  group_ns: overhead of a recomputed group in
    autograd and Python.  state_passes: how often a tensor of an optimizer's state costs a pass over memory as large as
    the parameters.  transport: by which its ranks exchange messages, unless the user asks for another.  device_type:
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
        group_ns=200_000,  # measured around groups of one small op
        state_passes=8.5,  # torch's optimizers run op by op: 20 passes for AdamW, 11 for SGD with momentum and decay
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
