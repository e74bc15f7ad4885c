"""DAPPLE's planner (PPoPP 2021, section 4, and its published code): speed-up of one synchronous step over one device.

A model of states j = 0..S-1 (`states`), compute and activations scaled to the global batch.  A plan is `copies` equal
pipelines; stage i holds the states start..end - 1, on r devices of each copy, the set D_i over all copies.  Per copy
M = global batch / (copies * micro-batch) micro-batches.  Bytes at a cut are those of the whole global batch.

    block = max over stages of C_i / (r_i copies) and of transfer(D_i, D_i+1, 2 alive), divided by M;
            alive instead of 2 alive for one copy of two stages, which the original scores by other code
    step = (M - 1) block + C / (copies M) + sum_i transfer(D_i, D_i+1, alive / (copies M))
           + max_i max(0, allreduce(D_i, W_i) - i block)
    score = C / step                                      C: compute of the whole model on one device

    allreduce(D, w) = 2 (n - 1) / n w / across                                    when D has devices of two servers
                      2 (n - 1) / n w / within / floor(n / 2)                     else; 0 for one device
    transfer(D, E, b) = b * (share of D on other servers) / single                when E lies on one server, and any are
                        b / across                                                when E lies on several
                        b / within                                                when all is on one server

Assumptions and their limits, as in the original: memory is ignored; an all-reduce overlaps only with the stages behind
it; filling the pipeline counts the compute of all stages as if unreplicated. The original also charges W_i with the
first state of the next stage (`overhang`), which is kept for comparison with its published scores.

Search (heuristic, like the original): for each number of copies, every placement of two stages that fills servers in
order or alternately, either stage first; and, for more stages, the DP on block over devices in order or alternating,

    best[j, m, r] = min over k < j, q of max(best[k, m - r, q], C(k..j) / (r copies), transfer)

with and without replicas. The plan with the highest score is chosen. O(S^2 n^3) for n devices per copy, vectorised
over S^2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopart.ir.errors import UsageError
from benchmarks.papers.planners.pipedream import Floats, Profile

Devices = frozenset[int]


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second within a server, of collectives across servers, and of one pair of devices across servers."""

    within: float = 25e9
    across: float = 3e9
    single: float = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """The training setting.

    servers: number of devices of each server; batches in samples; profile_batch: the batch of the profile.
    """

    servers: tuple[int, ...]
    global_batch: int
    micro_batch: int
    profile_batch: int
    links: Links = Links()
    overhang: bool = True


@dataclass(frozen=True, slots=True)
class Stage:
    """The states start..end - 1 on `replicas` devices of each copy. devices: devices of all copies."""

    start: int
    end: int
    replicas: int
    devices: Devices


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A plan. score: speed-up over one device; step_s: seconds per global batch."""

    score: float
    step_s: float
    copies: int
    stages: tuple[Stage, ...]


def evaluate(model: Profile, setting: Setting, copies: int, stages: Sequence[Stage]) -> Pipeline:
    """Return the score of a plan by the formulas above. O(stages * devices)."""
    micros = setting.global_batch // (copies * setting.micro_batch)
    if not micros:
        raise UsageError("a copy of the pipeline gets less than one micro-batch")
    scale = setting.global_batch / setting.profile_batch
    total = float(model.compute_s[-1]) * scale
    ways = 1 if copies == 1 and len(stages) == 2 else 2
    block, moved = 0.0, 0.0
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        block = max(block, _span(model.compute_s, stage.start, stage.end) * scale / (stage.replicas * copies))
        if after:
            alive = float(model.alive_bytes[stage.end - 1]) * scale
            block = max(block, transfer_s(setting, stage.devices, after.devices, ways * alive))
            moved += transfer_s(setting, stage.devices, after.devices, alive / copies / micros)
    block /= micros
    late = 0.0
    for i, stage in enumerate(stages):
        end = min(stage.end + setting.overhang, len(model.compute_s))
        weights = _span(model.parameter_bytes, stage.start, end)
        late = max(late, allreduce_s(setting, stage.devices, weights) - i * block)
    step = block * (micros - 1) + total / copies / micros + moved + late
    return Pipeline(total / step, step, copies, tuple(stages))


def data_parallel(model: Profile, setting: Setting) -> Pipeline:
    """Return the plan with one stage on all devices: C / n plus the exposed all-reduce. O(devices)."""
    everyone = frozenset(range(sum(setting.servers)))
    total = float(model.compute_s[-1]) * setting.global_batch / setting.profile_batch
    step = total / len(everyone) + allreduce_s(setting, everyone, float(model.parameter_bytes[-1]))
    return Pipeline(total / step, step, 1, (Stage(0, len(model.compute_s), len(everyone), everyone),))


def allreduce_s(setting: Setting, devices: Devices, size_bytes: float) -> float:
    """Return the seconds to sum `size_bytes` over the devices."""
    n = len(devices)
    if n == 1:
        return 0.0
    ring = 2 * (n - 1) / n * size_bytes
    crosses = len(_servers_of(setting, devices)) > 1
    return ring / setting.links.across if crosses else ring / setting.links.within / (n // 2)


def transfer_s(setting: Setting, source: Devices, target: Devices, size_bytes: float) -> float:
    """Return the seconds to move `size_bytes`, spread evenly over source, to target."""
    ends = tuple(accumulate(setting.servers))
    homes = _servers_of(setting, target)
    if len(homes) > 1:
        return size_bytes / setting.links.across
    far = sum(bisect_right(ends, device) not in homes for device in source)
    return size_bytes * far / len(source) / setting.links.single if far else size_bytes / setting.links.within


def solve(model: Profile, setting: Setting) -> Pipeline:
    """Return the plan with the highest score found by the search above."""
    world = sum(setting.servers)
    best = data_parallel(model, setting)
    for size in range(2, world + 1):
        copies = world // size
        if setting.global_batch // (copies * setting.micro_batch):
            for stages in _candidates(model, setting, size, copies):
                best = max(best, evaluate(model, setting, copies, stages), key=lambda plan: plan.score)
    return best


def _candidates(model: Profile, setting: Setting, size: int, copies: int) -> Iterator[tuple[Stage, ...]]:
    states = len(model.compute_s)
    for order in _orders(setting):
        for first in range(1, size):
            halves = [frozenset(order[: first * copies]), frozenset(order[first * copies : size * copies])]
            for a, b in (halves, halves[::-1]):
                for cut in (c for c in range(1, states) if model.legal[c, -1]):
                    yield (
                        Stage(0, cut, len(a) // copies, a),
                        Stage(cut, states, len(b) // copies, b),
                    )
        for most in dict.fromkeys((1, size - 1)):
            yield from _bottleneck(model, setting, order, copies, most, size)


def _orders(setting: Setting) -> tuple[tuple[int, ...], ...]:
    """Return the devices server by server, and alternating between servers."""
    starts = np.cumsum([0, *setting.servers[:-1]])
    turns = sorted((i, server) for server, count in enumerate(setting.servers) for i in range(count))
    return tuple(dict.fromkeys([tuple(range(sum(setting.servers))), tuple(int(starts[s]) + i for i, s in turns)]))


def _bottleneck(
    model: Profile, setting: Setting, order: Sequence[int], copies: int, most: int, size: int
) -> Iterator[tuple[Stage, ...]]:
    """Yield plans with the least block among those whose stages use devices in this order, one per size of the last
    stage.

    most: largest number of devices per stage and copy; size: devices per copy.
    """
    states = len(model.compute_s)
    scale = setting.global_batch / setting.profile_batch
    work = np.where(model.legal, model.compute_s - np.concatenate([[0.0], model.compute_s])[:, None], np.inf) * scale
    used = [(m, r) for m in range(1, size + 1) for r in range(1, min(m, most) + 1)]
    sets = {(m, r): frozenset(order[(m - r) * copies : m * copies]) for m, r in used}
    best: dict[tuple[int, int], Floats] = {}  # [m, r][j]: m devices used, the last stage has r and ends with state j
    came: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (k, q): where the stage before it ends, and its devices
    for m, r in used:
        if m == r:
            best[m, r], came[m, r] = work[0] / (r * copies), [(-1, 0)] * states
            continue
        before = range(1, min(m - r, most) + 1)
        costs = [2 * transfer_s(setting, sets[m - r, q], sets[m, r], 1.0) * scale for q in before]
        ends = [np.maximum(best[m - r, q], c * model.alive_bytes) for q, c in zip(before, costs, strict=True)]
        until = np.array(ends)
        ways = np.maximum(until.min(axis=0)[:, None], work[1:] / (r * copies))
        best[m, r] = ways.min(axis=0)
        came[m, r] = [(int(k), before[int(until[:, k].argmin())]) for k in ways.argmin(axis=0)]
    for r in range(1, min(size, most) + 1):
        if np.isfinite(best[size, r][-1]):
            yield _trace(came, sets, states, size, r)


def _trace(
    came: dict[tuple[int, int], list[tuple[int, int]]],
    sets: dict[tuple[int, int], Devices],
    states: int,
    m: int,
    r: int,
) -> tuple[Stage, ...]:
    found: list[Stage] = []
    end = states
    while end:
        k, q = came[m, r][end - 1]
        found.append(Stage(k + 1, end, r, sets[m, r]))
        m, r, end = m - r, q, k + 1
    return tuple(reversed(found))


def _span(prefix: Floats, start: int, end: int) -> float:
    return float(prefix[end - 1] - (prefix[start - 1] if start else 0.0))


def _servers_of(setting: Setting, devices: Devices) -> frozenset[int]:
    ends = tuple(accumulate(setting.servers))
    return frozenset(bisect_right(ends, device) for device in devices)
