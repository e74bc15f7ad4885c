"""This machine measured: what its devices compute and move, and how long messages between its ranks take.

All ranks measure their devices at the same time, so that processes on one CPU get their share of it.  Then pairs of
ranks send messages back and forth over the channels that the pipeline uses.  Devices of the same name get the median of
their rates.

Latency is half the round trip of a small message; bandwidth is the slope of time over size, errors relative.  Between
hosts one pair gives the latency; for the bandwidth all ranks of two hosts talk at once, for it is the port of the host.
Wrong when other work runs on the machine, when a matrix product does not represent the model (rates are what a large
product reaches, not the peak), when the links between hosts differ (neighbours are measured, and the median is taken),
and on CPUs, where messages and computation compete for the same cores.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopart.files.clusters import LOOPBACK, NVLINK, parse_cluster, this_host
from autopart.ir.cluster import Cluster, Device, Level, Link, check
from autopart.ir.errors import ClusterError
from autopart.launcher import adopt_task
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.launch.local import launch, under_torchrun

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
SMALL = 64
SIZES = {"cpu": (SMALL, 2**18, 2**20, 2**22, 2**24), "cuda": (SMALL, 2**20, 2**22, 2**24, 2**26)}
"""Bytes of the messages."""
LIMIT_S = 120.0
"""Local processes are ended after this time."""
_LARGEST = {"cpu": 4096, "cuda": 8192}
"""Rows of the largest matrix product."""
_COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the copy that measures the memory bandwidth: more than any cache holds."""
_BUDGET_S = 0.2
"""Seconds for one rate."""
_SIZE_BUDGET_S = 2.0
"""No message size is tried that would take longer than this."""

Pair = tuple[int, int]
Sample = tuple[int, float]
"""Bytes of a message and the nanoseconds of one way."""


def detect(ranks: int | None = None) -> Cluster:
    """Measure this machine; under torchrun, called on every rank, all machines that it started.

    ranks: local processes, by default one for each GPU, without a GPU two.  Raises ClusterError when a GPU would have
    to serve two of them, WorkerError when a process fails or takes longer than `LIMIT_S`.
    """
    gpus = torch.cuda.device_count()
    adopt_task(os.environ)
    if under_torchrun():
        told = parse_cluster(None, cuda_devices=gpus)
        sizes = tuple(level.size for level in told.levels)
        return _first(launch(probe, ranks or told.world, told.kind, sizes))
    world = ranks or gpus or 2
    if gpus and world > gpus:
        raise ClusterError(
            f"{world} ranks and {gpus} visible GPUs", why="a GPU serves one rank", fix=f"ask for at most {gpus} ranks"
        )
    return _first(launch(probe, world, "cuda" if gpus else "cpu", (world,), timeout=LIMIT_S))


def _first(results: list[Any]) -> Cluster:
    """Every rank returns the same cluster."""
    cluster: Cluster = results[0]
    return cluster


def probe(kind: str, sizes: tuple[int, ...]) -> Cluster:
    """One rank's part; every rank returns the same.  sizes: ranks of each level, innermost first; host, then all."""
    world = World(kind, sizes[-1], local=sizes[0])
    try:
        local = world.gather_numbers([float(os.environ.get("LOCAL_WORLD_SIZE", "1"))])
        if any(row != local[0] for row in local):
            raise world.known(ClusterError("the hosts run different numbers of ranks", where="LOCAL_WORLD_SIZE"))
        mine = measure_device(world.device, sizes[0])
        devices = [_device(json.loads(text)) for text in world.gather_text(json.dumps(asdict(mine)))]
        levels = [Level(size, _measure_level(world, sizes, index)) for index, size in enumerate(sizes) if size > 1]
        unknown = Level(1, NVLINK if kind == "cuda" else LOOPBACK)
        return check(Cluster(merge_devices(devices), tuple(levels) or (unknown,)))
    except BaseException as error:
        if (first := world.end(error)) is error:
            raise
        raise first from None
    finally:
        world.close()


def merge_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Devices of one name with the least memory and the median rates among them."""
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.kind, device.name), []).append(device)

    def middle(numbers: Iterable[int]) -> int:
        return rounded(statistics.median(numbers))

    def merged(group: list[Device]) -> Device:
        names = [name for name, _ in group[0].rates if all(name in dict(d.rates) for d in group)]
        return replace(
            group[0],
            memory_bytes=min(d.memory_bytes for d in group),
            flops_per_s=middle(d.flops_per_s for d in group),
            mem_bytes_per_s=middle(d.mem_bytes_per_s for d in group),
            rates=tuple((name, middle(d.rate(name) for d in group)) for name in names),
        )

    found = {key: merged(group) for key, group in groups.items()}
    return tuple(found[device.kind, device.name] for device in devices)


def rounded(number: float) -> int:
    """Three significant digits, at least 1: no measurement here is more accurate."""
    return max(1, int(float(f"{number:.3g}")))


def measure_device(device: torch.device, local: int) -> Device:
    """The device of this rank, one of `local` that share the host.  Takes about a second."""
    rates = {name: rate for name in DTYPES[device.type] if (rate := _matmul_rate(device, name))}
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / _seconds(lambda: target.copy_(source), device, _BUDGET_S)
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
    else:
        name, memory = _cpu_name(), this_host().memory_bytes // local
    name = "".join(letter for letter in name if letter.isprintable())[:100]
    return Device(device.type, memory, rates["float32"], rounded(bandwidth), name, tuple(rates.items()))


def _matmul_rate(device: torch.device, dtype: str) -> int:
    """Operations per second of a large square product; 0 when the device has none for this dtype."""
    rows, least = 256, _BUDGET_S / 10
    try:
        while _product_seconds(rows, dtype, device, 0.0) < least and rows < _LARGEST[device.type]:
            rows *= 2
        return rounded(2 * rows**3 / _product_seconds(rows, dtype, device, _BUDGET_S))
    except RuntimeError:
        return 0


def _product_seconds(rows: int, dtype: str, device: torch.device, budget_s: float) -> float:
    matrix = torch.ones(rows, rows, device=device, dtype=getattr(torch, dtype))
    return _seconds(lambda: matrix @ matrix, device, budget_s)


def _seconds(work: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    """Median time of one call, after one to warm up: of 3 to 50 calls within the budget, of one without a budget."""
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    work()
    while len(times) < (3 if budget_s else 1) or (len(times) < 50 and time.perf_counter() < deadline):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _device(fields: Mapping[str, Any]) -> Device:
    return Device(**{**fields, "rates": tuple((name, rate) for name, rate in fields["rates"])})


def pairs_of(sizes: Sequence[int], index: int) -> list[list[Pair]]:
    """Who talks to whom to measure a level: for each two neighbouring groups that it joins, their ranks one to one."""
    inner, size, world = sizes[index - 1] if index else 1, sizes[index], sizes[-1]
    if not index:  # one pair a host: more would share its memory
        return [[(base, base + 1)] for base in range(0, world, size)]
    bases = range(0, world - inner, 2 * inner)
    return [[(base + i, base + inner + i) for i in range(inner)] for base in bases]


def _measure_level(world: World, sizes: Sequence[int], index: int) -> Link:
    groups = pairs_of(sizes, index)
    lone = _ping_pong(world, [group[0] for group in groups], SIZES[world.device.type])
    links = [fit_link(lone[group[0][0]]) for group in groups]
    latency = statistics.median(link.latency_ns for link in links)
    ports: list[float] = [link.bytes_per_s for link in links]
    if len(groups[0]) > 1:
        together = _ping_pong(world, [pair for group in groups for pair in group], SIZES[world.device.type])
        shared = [sum(fit_link(together[a]).bytes_per_s for a, _ in group) for group in groups]
        ports = [max(alone, several) for alone, several in zip(ports, shared, strict=True)]
    return Link(rounded(latency), rounded(statistics.median(ports)))


def fit_link(samples: Sequence[Sample]) -> Link:
    """Latency: the time of the smallest message.  Bandwidth: least squares over the others, errors relative to time."""
    latency = min(samples)[1]
    rest = [(size, max(ns, 1.0)) for size, ns in samples if size > min(samples)[0]]
    above = sum((size / ns) * (1 - latency / ns) for size, ns in rest)
    if above > 0:
        ns_per_byte = above / sum((size / ns) ** 2 for size, ns in rest)
    else:  # noise drowned the latency
        size, ns = max(rest)
        ns_per_byte = ns / size
    return Link(rounded(latency), rounded(1e9 / ns_per_byte))


def _ping_pong(world: World, pairs: Sequence[Pair], sizes: Sequence[int]) -> list[list[Sample]]:
    """Times of all pairs at once, by the first rank of each.  Collective."""
    groups = {pair: world.group(pair) for pair in pairs}  # every rank opens every group, in the same order
    samples: list[Sample] = []
    for (a, b), group in groups.items():
        if world.rank in (a, b):
            samples = _Player(world, a + b - world.rank, group, first=world.rank == a).play(sizes)
    return [[(int(n), ns) for n, ns in json.loads(text)] for text in world.gather_text(json.dumps(samples))]


class _Player:
    """One side of a pair.  The first one leads: it measures the time and decides whether a larger message is tried."""

    def __init__(self, world: World, peer: int, group: dist.ProcessGroup, *, first: bool) -> None:
        self._device, self._peer, self._group, self._first = world.device, peer, group, first

    def play(self, sizes: Sequence[int]) -> list[Sample]:
        samples: list[Sample] = []
        for place, size in enumerate(sizes):
            ball = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._volley(ball)  # opens the connection
            times = [self._volley(ball) for _ in range(max(5, min(100, 2**26 // size)))]
            samples.append((size, statistics.median(times) / 2))
            growth = sizes[place + 1] / size if place + 1 < len(sizes) else 0
            slow = place > 0 and samples[-1][1] * growth * 12 > _SIZE_BUDGET_S * 1e9
            if not self._agree(not slow):
                break
        return samples

    def _volley(self, ball: torch.Tensor) -> int:
        """There and back; nanoseconds."""
        start = time.perf_counter_ns()
        if self._first:
            self._send(ball)
            self._receive(ball)
        else:
            self._send(self._receive(ball))
        _synchronize(self._device)
        return time.perf_counter_ns() - start

    def _agree(self, proceed: bool) -> bool:
        """What the first one decides."""
        flag = torch.full((1,), proceed, dtype=torch.uint8, device=self._device)
        if self._first:
            self._send(flag)
        else:
            flag = self._receive(flag)
        return bool(flag.item())

    def _receive(self, like: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(like)
        with waiting(self._peer):
            dist.recv(found, self._peer, group=self._group)
        return found

    def _send(self, tensor: torch.Tensor) -> None:
        with waiting(self._peer):
            dist.send(tensor, self._peer, group=self._group)
