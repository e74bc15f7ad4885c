"""Piper's planner (NeurIPS 2021, section 4; `algo.cpp`): least seconds per micro-batch when memory binds.

A stage runs the set S of layers with d-fold data and t-fold tensor parallelism, on d t devices; each layer picks one of
its modes for t (with or without recomputation).  With N micro-batches per step, B bytes per second and, per layer v in
its mode, p_v seconds, w_v parameter bytes, a_v bytes held per micro-batch in flight and b_v bytes in any case:

    time(S, t, d, y) = sum_v p_v / d + (2 sum (bytes + sync) over edges that leave or enter S / d
                                        + sum_v 4 (d - 1) w_v / (d N)) / B
    sum_v (a_v y + b_v) <= memory;   d divides N

y = ceil(s / d) micro-batches are in flight, where s is the sum of d over this stage and all after it; s <= N.

Minimise the largest time. State: a set D of layers closed under successors (what is left from some stage on), at most
k devices for it, at most s.  Recurrence, over the sets D' inside D and all t, d:

    best[D, k, s] = min max(best[D', k - d t, s - d], time(D - D', t, d, ceil(s / d)))

O(|D|^2 k s) for each (t, d), vectorised over D', k and s.

The choice of modes is a knapsack. Piper swaps layers from the fastest to the leanest mode by least extra time per byte
until the stage fits. This code does the same and then undoes the costliest unneeded swap, so plans are not proved
optimal where memory is binding. Assumptions: flat bandwidth, no overlap, no latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import InfeasibleError, UsageError
from benchmarks.papers.planners.states import downsets, nested, table

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run a layer. seconds and held_bytes per micro-batch; sync bytes per parent and per child."""

    name: str
    seconds: float
    parameter_bytes: float
    held_bytes: float
    fixed_bytes: float
    sync_in: tuple[tuple[int, float], ...] = ()
    sync_out: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model. modes[v][t]: the modes of layer v on t devices; edges: (from, to, bytes per micro-batch)."""

    modes: tuple[dict[int, tuple[Mode, ...]], ...]
    edges: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Number of devices, memory of each, bytes per second of every link, and micro-batches per step."""

    devices: int
    memory_bytes: float
    bytes_per_s: float
    micros: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. layers: ascending; modes: index into the modes of each layer; data, tensor: degrees d and t."""

    layers: tuple[int, ...]
    data: int
    tensor: int
    modes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A plan. objective_s: seconds per micro-batch in steady state."""

    objective_s: float
    stages: tuple[Stage, ...]


def evaluate(model: Model, limits: Limits, stages: Sequence[Stage]) -> float:
    """Return the seconds per micro-batch by the formulas, infinite if a limit is exceeded. O(stages * edges)."""
    stage_of = {v: i for i, stage in enumerate(stages) for v in stage.layers}
    behind = sum(stage.data for stage in stages)
    used = sum(stage.data * stage.tensor for stage in stages)
    if len(stage_of) < len(model.modes) or used > limits.devices or behind > limits.micros:
        return np.inf
    if any(stage_of[u] > stage_of[v] for u, v, _ in model.edges):
        return np.inf
    worst = 0.0
    for stage in stages:
        d, y, own = stage.data, -(-behind // stage.data), set(stage.layers)
        behind -= d
        picked = {v: model.modes[v][stage.tensor][m] for v, m in zip(stage.layers, stage.modes, strict=True)}
        if sum(m.held_bytes * y + m.fixed_bytes for m in picked.values()) > limits.memory_bytes or limits.micros % d:
            return np.inf
        sent = sum(2 * (size + dict(picked[u].sync_out)[v]) for u, v, size in model.edges if u in own and v not in own)
        sent += sum(2 * (size + dict(picked[v].sync_in)[u]) for u, v, size in model.edges if v in own and u not in own)
        reduced = sum(4 * (d - 1) * m.parameter_bytes / d / limits.micros for m in picked.values())
        compute = sum(m.seconds for m in picked.values())
        worst = max(worst, (sent / d + reduced) / limits.bytes_per_s + compute / d)
    return worst


def solve(model: Model, limits: Limits) -> Pipeline:
    """Return the best pipeline by the recurrence above. Raises InfeasibleError if none fits."""
    if limits.devices < 1 or limits.micros < 1 or limits.bytes_per_s <= 0:
        raise UsageError("a pipeline needs a device, a micro-batch and a bandwidth")
    children: list[list[int]] = [[] for _ in model.modes]
    for u, v, _ in model.edges:
        children[u].append(v)
    masks = table(downsets(children), len(model.modes))
    inside = nested(masks)
    inside[0, 1:] = True
    stages = _Stages(model, limits)
    best = np.full((len(masks), limits.devices + 1, stages.most + 1), np.inf)
    best[0] = 0
    for whole in range(1, len(masks)):
        smaller = np.flatnonzero(inside[:, whole])
        for t, d, times in stages.times(masks[whole] & ~masks[smaller]):
            ways = np.maximum(best[smaller, : limits.devices + 1 - t * d, : stages.most + 1 - d], times[:, None, d:])
            here = best[whole, t * d :, d:]
            np.minimum(here, ways.min(axis=0), out=here)
        np.minimum.accumulate(best[whole], axis=0, out=best[whole])
        np.minimum.accumulate(best[whole], axis=1, out=best[whole])
    if not np.isfinite(best[-1, -1, -1]):
        raise InfeasibleError(
            f"no pipeline on {limits.devices} devices fits {limits.memory_bytes / 2**30:.2f} GiB each",
            why="parameters, gradients and activations in flight need more, even with the leanest mode of every layer",
        )
    return Pipeline(float(best[-1, -1, -1]), tuple(_trace(best, masks, inside, stages)))


def _trace(best: Floats, masks: Bools, inside: Bools, stages: _Stages) -> list[Stage]:
    """Return the stages of best[-1, -1, -1], first to last."""
    found = []
    whole, k, s = len(best) - 1, best.shape[1] - 1, best.shape[2] - 1
    while whole:
        value = best[whole, k, s]
        k = int(np.flatnonzero(best[whole, :, s] == value)[0])  # fewest devices, then least s
        s = int(np.flatnonzero(best[whole, k] == value)[0])
        smaller = np.flatnonzero(inside[:, whole])
        for t, d, times in stages.times(masks[whole] & ~masks[smaller]):
            if t * d > k or d > s:
                continue
            hits = np.flatnonzero(np.maximum(best[smaller, k - t * d, s - d], times[:, s]) == value)
            if hits.size:
                rest = int(smaller[hits[0]])
                found.append(stages.stage(masks[whole] & ~masks[rest], t, d, -(-s // d)))
                whole, k, s = rest, k - t * d, s - d
                break
        else:
            raise AssertionError("no stage has this value of the table")
    return found


class _Stages:
    """Times of stages. Arrays are over (stage, layer, mode), padded with a mode that is never chosen."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.most = min(limits.micros, limits.devices)
        self.tensors = sorted({t for modes in model.modes for t in modes if t <= limits.devices})
        self.degrees = {
            t: [d for d in range(1, self.most + 1) if limits.micros % d == 0 and d * t <= limits.devices]
            for t in self.tensors
        }
        self.facts = {t: self._facts(t) for t in self.tensors}

    def _facts(self, t: int) -> Floats:
        """Return (seconds, parameter bytes, held bytes, fixed bytes) by layer and mode."""
        width = max(len(modes.get(t, ())) for modes in self.model.modes)
        facts = np.full((4, len(self.model.modes), width), np.inf)
        facts[1] = 0
        for v, modes in enumerate(self.model.modes):
            for m, mode in enumerate(modes.get(t, ())):
                facts[:, v, m] = mode.seconds, mode.parameter_bytes, mode.held_bytes, mode.fixed_bytes
        return facts

    def times(self, sets: Bools) -> Iterator[tuple[int, int, Floats]]:
        """Yield (t, d, time by stage and s) for each row of layers; infinite where it does not fit."""
        for t in self.tensors:
            sent = self._sent(sets, t)
            for d in self.degrees[t]:
                by_flight = self._by_flight(sets, t, d, self._layer_times(t, d, sent))
                yield t, d, by_flight[:, np.maximum(-(-np.arange(self.most + 1) // d), 1) - 1]

    def stage(self, layers: Bools, t: int, d: int, y: int) -> Stage:
        """Return the stage with the modes that its time assumes."""
        sets = layers[None, :]
        picked = self._choose(sets, self._layer_times(t, d, self._sent(sets, t)), self._memory(t, y)[None])[0]
        own = np.flatnonzero(layers)
        return Stage(tuple(map(int, own)), d, t, tuple(int(picked[v]) for v in own))

    def _layer_times(self, t: int, d: int, sent: Floats) -> Floats:
        seconds, weights = self.facts[t][:2]
        reduced = 4 * (d - 1) * weights / d / self.limits.micros
        return np.asarray((sent / d + reduced) / self.limits.bytes_per_s + seconds / d)

    def _memory(self, t: int, y: int) -> Floats:
        held, fixed = self.facts[t][2:]
        return np.asarray(held * y + fixed)

    def _by_flight(self, sets: Bools, t: int, d: int, time: Floats) -> Floats:
        """Return the time by stage and micro-batches in flight, 1 first: fastest modes if they fit, else `_choose`."""
        fast, limit = time.argmin(axis=2), self.limits.memory_bytes
        total = np.where(sets, _pick(time, fast), 0).sum(axis=1)
        memory = np.stack([self._memory(t, y) for y in range(1, -(-self.most // d) + 1)])
        least = (np.where(sets[:, None], memory.min(axis=2), 0)).sum(axis=2)
        held, fixed = (
            np.where(sets, _pick(np.broadcast_to(f, time.shape), fast), 0).sum(axis=1) for f in self.facts[t][2:]
        )
        fits = held[:, None] * np.arange(1, len(memory) + 1) + fixed[:, None] <= limit
        found = np.where(fits, total[:, None], np.inf)
        rows, flights = np.nonzero(~fits & (least <= limit))
        if rows.size:
            picked = self._choose(sets[rows], time[rows], memory[flights])
            found[rows, flights] = np.where(sets[rows], _pick(time[rows], picked), 0).sum(axis=1)
        return found

    def _sent(self, sets: Bools, t: int) -> Floats:
        """Return the bytes over the edges that leave or enter, in both directions, by stage, layer and mode."""
        sent = np.zeros((*sets.shape, self.facts[t].shape[2]))
        for u, v, size in self.model.edges:
            out, into = sets[:, u] & ~sets[:, v], sets[:, v] & ~sets[:, u]
            for m, mode in enumerate(self.model.modes[u].get(t, ())):
                sent[out, u, m] += 2 * (size + dict(mode.sync_out).get(v, 0.0))
            for m, mode in enumerate(self.model.modes[v].get(t, ())):
                sent[into, v, m] += 2 * (size + dict(mode.sync_in).get(u, 0.0))
        return sent

    def _choose(self, sets: Bools, time: Floats, memory: Floats) -> Ints:
        """Return the mode of each layer: fastest modes, then swaps by least extra time per byte until the stage
        fits.
        """
        fast, lean = time.argmin(axis=2), memory.argmin(axis=2)
        with np.errstate(invalid="ignore"):  # layers without a mode for t are outside these sets
            extra, saved = _pick(time, lean) - _pick(time, fast), _pick(memory, fast) - _pick(memory, lean)
        useful = sets & (saved > 0)
        order = np.argsort(np.where(useful, extra / np.where(useful, saved, 1), np.inf), axis=1, kind="stable")
        over = np.where(sets, _pick(memory, fast), 0).sum(axis=1) - self.limits.memory_bytes
        saving = np.cumsum(np.take_along_axis(np.where(useful, saved, 0), order, axis=1), axis=1)
        count = np.where(over > 0, (saving < over[:, None]).sum(axis=1) + 1, 0)
        swapped = np.zeros_like(sets)
        np.put_along_axis(swapped, order, np.arange(sets.shape[1])[None, :] < count[:, None], axis=1)
        swapped &= useful
        spare = np.where(swapped, saved, 0).sum(axis=1) - over
        needless = swapped & (saved <= spare[:, None]) & (over > 0)[:, None]
        rows = np.flatnonzero(needless.any(axis=1))
        swapped[rows, np.where(needless, extra, -1.0).argmax(axis=1)[rows]] = False
        return np.asarray(np.where(swapped, lean, fast))


def _pick(values: Floats, modes: Ints) -> Floats:
    rows, layers = np.ogrid[: modes.shape[0], : modes.shape[1]]
    return np.asarray(values[rows, layers, modes])
