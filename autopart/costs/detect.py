"""Measure this machine: rates of its devices, and times of messages between its ranks.

All ranks measure their devices at the same time, so that processes on one CPU get their share of it.  Then pairs of
ranks send messages back and forth over the channels of the pipeline.  Devices of the same name get the median of their
rates.

Latency is half the round trip of a small message; bandwidth is the slope of time over size, errors relative.  Between
hosts one pair gives the latency; for the bandwidth of the host's port all ranks of two hosts talk at once.  This is
wrong if other work runs on the machine, if a matrix product does not represent the model (rates are what a large
product reaches, not the peak), if the links between hosts differ (the median over neighbours is taken), and on CPUs,
where messages and computation compete for the same cores.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from autopart.costs.measure import wait_for
from autopart.files.clusters import link_within_host, parse_cluster, this_host
from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device, Level, Link, check
from autopart.ir.errors import ClusterError
from autopart.launcher import adopt_task
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.launch.local import launch, under_torchrun
from autopart.runtime.stages.products import multiply

LIMIT_S = 120.0
"""Time limit of the local processes."""
_BUDGET_S = 0.2
"""Seconds for one rate."""
_SIZE_BUDGET_S = 2.0
"""Message sizes that would take longer are not tried."""

Pair = tuple[int, int]
Sample = tuple[int, float]
"""Bytes of a message and the nanoseconds of one way."""


def detect(ranks: int | None = None) -> Cluster:
    """Measure this machine; under torchrun, called on every rank, all machines of the launch.

    ranks: local processes, by default one for each GPU, without a GPU two.  Raises ClusterError if there are fewer GPUs
    than ranks, WorkerError if a process fails or takes longer than `LIMIT_S`.
    """
    gpus = torch.cuda.device_count()
    adopt_task(os.environ)
    results: list[Cluster]
    if under_torchrun():
        told = parse_cluster(None, cuda_devices=gpus)
        sizes = tuple(level.size for level in told.levels)
        results = launch(probe, ranks or told.world, told.kind, sizes)
    else:
        world = ranks or gpus or 2
        if gpus and world > gpus:
            what, fix = f"{world} ranks and {gpus} visible GPUs", f"ask for at most {gpus} ranks"
            raise ClusterError(what, why="a GPU serves one rank", fix=fix)
        results = launch(probe, world, "cuda" if gpus else "cpu", (world,), timeout=LIMIT_S)
    return results[0]


def probe(kind: str, sizes: tuple[int, ...]) -> Cluster:
    """Measure on one rank; every rank returns the same.  sizes: ranks of each level (host, all), innermost first."""
    world = World(kind, sizes[-1], local=sizes[0])
    try:
        local = world.gather_numbers([float(os.environ.get("LOCAL_WORLD_SIZE", "1"))])
        if any(row != local[0] for row in local):
            raise world.known(ClusterError("the hosts run different numbers of ranks", where="LOCAL_WORLD_SIZE"))
        devices = world.gather_objects(measure_device(world.device, sizes[0]))
        levels = [Level(size, _measure_level(world, sizes, index)) for index, size in enumerate(sizes) if size > 1]
        unknown = Level(1, link_within_host(kind))
        return check(Cluster(merge_devices(devices), tuple(levels) or (unknown,)))
    except BaseException as error:
        if (first := world.end(error)) is error:
            raise
        raise first from None
    finally:
        world.close()


def merge_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Give devices of one name the least memory and the median rates among them."""
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.kind, device.name), []).append(device)

    def middle(numbers: Iterable[int]) -> int:
        return rounded(statistics.median(numbers))

    def merged(group: list[Device]) -> Device:
        names = [name for name, _ in group[0].rates if all(name in dict(d.rates) for d in group)]
        least = min(group, key=lambda d: d.memory_bytes)
        return replace(
            group[0],
            memory_bytes=least.memory_bytes,
            reserve_bytes=least.reserve_bytes,
            flops_per_s=middle(d.flops_per_s for d in group),
            mem_bytes_per_s=middle(d.mem_bytes_per_s for d in group),
            rates=tuple((name, middle(d.rate(name) for d in group)) for name in names),
        )

    found = {key: merged(group) for key, group in groups.items()}
    return tuple(found[device.kind, device.name] for device in devices)


def rounded(number: float) -> int:
    """Round to three significant digits, at least 1."""
    return max(1, int(float(f"{number:.3g}")))


def measure_device(device: torch.device, local: int) -> Device:
    """Measure the device of this rank, one of `local` on this host.  Takes about a second."""
    kind = DEVICE_KINDS[device.type]
    rates = {name: rate for name in kind.dtypes if (rate := _matmul_rate(device, name))}
    source = torch.ones(kind.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / _seconds("target.copy_(source)", _BUDGET_S, target=target, source=source)
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
    else:
        name, memory = _cpu_name(), this_host().memory_bytes // local
    name = "".join(letter for letter in name if letter.isprintable())[:100]
    found = Device(device.type, memory, rates["float32"], rounded(bandwidth), name, tuple(rates.items()))
    return replace(found, reserve_bytes=kind.reserve(memory))


def _matmul_rate(device: torch.device, dtype: str) -> int:
    """Return the operations per second of a large square product; 0 if the device does not support the dtype."""
    rows, least = 256, _BUDGET_S / 10
    try:
        while _product_seconds(rows, dtype, device, 0.0) < least and rows < DEVICE_KINDS[device.type].product_rows:
            rows *= 2
        return rounded(2 * rows**3 / _product_seconds(rows, dtype, device, _BUDGET_S))
    except RuntimeError:
        return 0


def _product_seconds(rows: int, dtype: str, device: torch.device, budget_s: float) -> float:
    matrix = torch.ones(rows, rows, device=device, dtype=getattr(torch, dtype))
    return _seconds("multiply(matrix, matrix)", budget_s, matrix=matrix, multiply=multiply)


def _seconds(work: str, budget_s: float, **operands: Any) -> float:
    """Return the median time of a statement over runs within the budget; without one, the time of a single run."""
    timer = Timer(work, globals=operands, num_threads=torch.get_num_threads())
    timer.timeit(1)  # to warm up
    return timer.blocked_autorange(min_run_time=budget_s).median if budget_s else timer.timeit(1).median


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def pairs_of(sizes: Sequence[int], index: int) -> list[list[Pair]]:
    """Return the pairs that measure a level: the ranks of each two neighbouring groups that it joins, one to one."""
    inner, size, world = sizes[index - 1] if index else 1, sizes[index], sizes[-1]
    if not index:  # one pair on each host, since more would share its memory
        return [[(base, base + 1)] for base in range(0, world, size)]
    bases = range(0, world - inner, 2 * inner)
    return [[(base + i, base + inner + i) for i in range(inner)] for base in bases]


def _measure_level(world: World, sizes: Sequence[int], index: int) -> Link:
    groups = pairs_of(sizes, index)
    sizes_bytes = DEVICE_KINDS[world.device.type].message_bytes
    lone = _ping_pong(world, [group[0] for group in groups], sizes_bytes)
    links = [fit_link(lone[group[0][0]]) for group in groups]
    latency = statistics.median(link.latency_ns for link in links)
    ports: list[float] = [link.bytes_per_s for link in links]
    if len(groups[0]) > 1:
        together = _ping_pong(world, [pair for group in groups for pair in group], sizes_bytes)
        shared = [sum(fit_link(together[a]).bytes_per_s for a, _ in group) for group in groups]
        ports = [max(alone, several) for alone, several in zip(ports, shared, strict=True)]
    return Link(rounded(latency), rounded(statistics.median(ports)))


def fit_link(samples: Sequence[Sample]) -> Link:
    """Fit a link: latency from the smallest message, bandwidth by least squares of relative errors over the others."""
    latency = min(samples)[1]
    rest = [(size, max(ns, 1.0)) for size, ns in samples if size > min(samples)[0]]
    above = sum((size / ns) * (1 - latency / ns) for size, ns in rest)
    if above > 0:
        ns_per_byte = above / sum((size / ns) ** 2 for size, ns in rest)
    else:  # noise exceeds the latency
        size, ns = max(rest)
        ns_per_byte = ns / size
    return Link(rounded(latency), rounded(1e9 / ns_per_byte))


def _ping_pong(world: World, pairs: Sequence[Pair], sizes: Sequence[int]) -> list[list[Sample]]:
    """Return the samples of all pairs, measured at once, by first rank.  Collective."""
    groups = {pair: world.group(pair) for pair in pairs}  # every rank opens every group, in the same order
    samples: list[Sample] = []
    for (a, b), group in groups.items():
        if world.rank in (a, b):
            samples = _play(a + b - world.rank, group, sizes, world.device, first=world.rank == a)
    return world.gather_objects(samples)


def _play(
    peer: int, group: dist.ProcessGroup, sizes: Sequence[int], device: torch.device, *, first: bool
) -> list[Sample]:
    """Measure a pair on one of its ranks; the first one decides whether a larger message is tried."""

    def round_trip(message: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Send a message there and back; return the nanoseconds and the message as it arrived."""
        arrived, start = torch.empty_like(message), time.perf_counter_ns()
        with waiting(peer):
            if first:
                dist.send(message, peer, group=group)
            dist.recv(arrived, peer, group=group)
            if not first:
                dist.send(arrived, peer, group=group)
        wait_for(device)
        return time.perf_counter_ns() - start, arrived

    samples: list[Sample] = []
    for place, size in enumerate(sizes):
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        round_trip(message)  # opens the connection
        times = [round_trip(message)[0] for _ in range(max(5, min(100, 2**26 // size)))]
        samples.append((size, statistics.median(times) / 2))
        growth = sizes[place + 1] / size if place + 1 < len(sizes) else 0
        slow = place > 0 and samples[-1][1] * growth * 12 > _SIZE_BUDGET_S * 1e9
        _, stop = round_trip(torch.full((1,), slow, dtype=torch.uint8, device=device))
        if stop.item():
            break
    return samples
