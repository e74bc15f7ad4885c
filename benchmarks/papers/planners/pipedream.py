"""PipeDream's planner (SOSP 2019, section 3.1; `optimizer_graph_hierarchical.py`): least seconds per minibatch.

A stage runs from state k (exclusive) to state j of the graph's cuts (`states`), on r replicas.  With C its compute
seconds per minibatch, W its parameter bytes, B the bytes per second of its level and alive[s] the bytes at cut s:

    stage(k, j, r) = (C + 4 (r - 1) W / (r B)) / r
    in = 2 alive[k] / (r B)     out = 2 alive[j] / (r B), nothing after the last state

Minimise the maximum of all of these over the stages. State and recurrence, for the states i..j on m machines:

    A[i, j, m] = min(first(i, j, m), min over k and r < m of max(A[i, k, m - r], stage(k, j, r), in, out))

first(i, j, r) is the stage that a segment begins with: it pays no transfers, and its all-reduce is divided by the
machines of the level below.  On the next level C of a stage is A of the whole level below.  O(S^3 n^2) a level, S^2 n^2
on the last, vectorised.

Assumptions and their limits, as in the original, whose quirks are kept (all-reduce added to compute, the divisor above,
no fill or drain). One difference: segments are differences of nested cuts only, while the original may subtract cuts
that are not nested when it solves a lower level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import InfeasibleError, UsageError
from benchmarks.papers.planners.states import Parents, cut_states, nested, table

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Totals of each state s over everything before its cut: compute_s in seconds, parameter_bytes, activation_bytes.

    alive_bytes: bytes crossing the cut. legal[k + 1, j]: state k is before state j; row 0 is the empty start.
    """

    compute_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    alive_bytes: Floats
    legal: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the cluster: its machines (devices on the lowest level) and the bytes per second between them."""

    machines: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of the cost model.

    activations: transfers count; straight: one replica per stage; memory_bytes: limit per device, None for no limit.
    """

    activations: bool = True
    straight: bool = False
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The states start..end - 1 on `replicas` machines of a level. Start 0 is the beginning of the model.

    inner: the stages within each machine, if it has lower levels.
    """

    start: int
    end: int
    replicas: int
    inner: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A plan. objective_s: seconds per minibatch in steady state."""

    objective_s: float
    stages: tuple[Stage, ...]


def profile(
    parents: Parents,
    compute_s: Sequence[float],
    activation_bytes: Sequence[float],
    parameter_bytes: Sequence[float],
) -> Profile:
    """Return the profile of a DAG whose node v runs compute_s[v] seconds per minibatch. O(states^2 * nodes)."""
    states = cut_states(parents)
    inside = table(states.inside, len(parents))
    legal = np.vstack([np.ones((1, len(inside)), dtype=np.bool_), nested(inside)])
    sums = inside.astype(np.float64) @ np.array([compute_s, parameter_bytes, activation_bytes], dtype=np.float64).T
    alive = table(states.alive, len(parents)).astype(np.float64) @ np.array(activation_bytes, dtype=np.float64)
    return Profile(sums[:, 0], sums[:, 1], sums[:, 2], alive, legal)


def solve(model: Profile, levels: Sequence[Level], rules: Rules | None = None) -> Pipeline:
    """Return the best pipeline of the cost model above. levels: lowest first. Raises InfeasibleError."""
    if not levels or any(level.machines < 1 or level.bytes_per_s <= 0 for level in levels):
        raise UsageError("a level needs at least one machine and a bandwidth")
    rules = rules or Rules()
    solved: list[_Level] = []
    compute = _differences(model.compute_s, model.legal)
    for height, level in enumerate(levels):
        below = levels[height - 1].machines if height else 1
        solved.append(_Level(model, level, below, compute, rules))
        compute = solved[-1].solve(last=height == len(levels) - 1)
    objective = float(compute[0, -1])
    if not np.isfinite(objective):
        raise InfeasibleError("no pipeline fits the memory of the devices", why="under PipeDream's memory constraint")
    return Pipeline(objective, _stages(solved, 0, len(model.compute_s) - 1))


def evaluate(model: Profile, levels: Sequence[Level], stages: Sequence[Stage], rules: Rules | None = None) -> float:
    """Return the seconds per minibatch of a pipeline by the formulas, without the tables of `solve`. O(stages).

    Memory is not checked.
    """
    activations = (rules or Rules()).activations
    level, below = levels[-1], levels[-2].machines if len(levels) > 1 else 1
    worst = 0.0
    for stage in stages:
        compute = _span(model.compute_s, stage)
        if len(levels) > 1:
            compute = evaluate(model, levels[:-1], stage.inner, rules)
        first = stage is stages[0]
        reduce = 4 * (stage.replicas - 1) * _span(model.parameter_bytes, stage) / (level.bytes_per_s * stage.replicas)
        times = [(compute + reduce / (below if first else 1)) / stage.replicas]
        if activations and not first:
            cuts = [stage.start - 1] + [stage.end - 1] * (stage.end < len(model.compute_s))
            times += [2 * float(model.alive_bytes[cut]) / (stage.replicas * level.bytes_per_s) for cut in cuts]
        worst = max(worst, *times)
    return worst


def _span(prefix: Floats, stage: Stage) -> float:
    return float(prefix[stage.end - 1] - (prefix[stage.start - 1] if stage.start else 0.0))


def _differences(prefix: Floats, legal: npt.NDArray[np.bool_]) -> Floats:
    """Return [i, j], the sum over states i..j, infinite where they are not nested."""
    return np.where(legal, prefix[None, :] - np.concatenate([[0.0], prefix])[:, None], np.inf)


class _Level:
    """One level: its stage times and, after `solve`, the table A (starts, states, machines)."""

    def __init__(self, model: Profile, level: Level, below: int, compute: Floats, rules: Rules) -> None:
        self.n, self.rules = level.machines, rules
        weights = np.where(model.legal, _differences(model.parameter_bytes, model.legal), 0.0)
        self.stash = weights + np.where(model.legal, _differences(model.activation_bytes, model.legal), 0.0)
        alive = 2 * model.alive_bytes / level.bytes_per_s
        outward = np.append(alive[:-1], 0.0)
        self.later: list[Floats] = []  # [r - 1][k, j]: a stage after another one, with its transfers
        self.first: list[Floats] = []  # [r - 1][i, j]: the stage a segment begins with
        for r in range(1, (1 if rules.straight else self.n) + 1):
            reduce = 4 * (r - 1) * weights / (level.bytes_per_s * r)
            self.first.append((compute + reduce / below) / r)
            stage = ((compute + reduce) / r)[1:]
            if rules.activations:
                stage = np.maximum(stage, np.maximum(alive[:, None], outward[None, :]) / r)
            self.later.append(stage)
        self.best = np.empty((0, 0, 0))

    def solve(self, *, last: bool) -> Floats:
        """Return A[:, :, n]; on the last level only the row of the whole model."""
        starts, states = (1 if last else len(self.first[0])), self.first[0].shape[1]
        self.best = np.full((starts, states, self.n + 1), np.inf)
        for m in range(1, self.n + 1):
            if m <= len(self.first):
                self.best[:, :, m] = self._fit(self.first[m - 1], self.n - m, m)[:starts]
            for r in range(1, min(m, len(self.later) + 1)):
                later = self._fit(self.later[r - 1], self.n - m, r)
                for i in range(starts):
                    self._extend(i, m, r, later)
        return self.best[:, :, self.n]

    def _fit(self, stage: Floats, behind: int, replicas: int) -> Floats:
        """Return the stage times, infinite where memory does not suffice for the minibatches in flight per replica."""
        if self.rules.memory_bytes is None:
            return stage
        flight = -(-behind // replicas)
        stash = self.stash[-len(stage) :]
        return np.where(stash * flight <= self.rules.memory_bytes, stage, np.inf)

    def _extend(self, i: int, m: int, r: int, later: Floats) -> None:
        """Lower A[i, :, m] by a last stage on r machines. States before i cannot be part of the segment."""
        ways = np.maximum(self.best[i, i:, m - r, None], later[i:, i:])
        if ways.size:
            np.minimum(self.best[i, i:, m], ways.min(axis=0), out=self.best[i, i:, m])

    def trace(self, i: int, j: int) -> list[tuple[int, int, int]]:
        """Return (start, end, replicas) of the stages of A[i, j, n], in order."""
        found: list[tuple[int, int, int]] = []
        m = self.n
        while True:
            value = self.best[i, j, m]
            if m <= len(self.first) and self._fit(self.first[m - 1], self.n - m, m)[i, j] == value:
                return [(i, j + 1, m), *reversed(found)]
            k, r = self._last_stage(i, j, m, float(value))
            found.append((k + 1, j + 1, r))
            j, m = k, m - r

    def _last_stage(self, i: int, j: int, m: int, value: float) -> tuple[int, int]:
        for r in range(1, min(m, len(self.later) + 1)):
            later = self._fit(self.later[r - 1], self.n - m, r)[i:, j]
            hits = np.flatnonzero(np.maximum(self.best[i, i:, m - r], later) == value)
            if hits.size:
                return i + int(hits[0]), r
        raise AssertionError("no stage has this value of the table")


def _stages(solved: Sequence[_Level], i: int, j: int) -> tuple[Stage, ...]:
    return tuple(
        Stage(start, end, replicas, _stages(solved[:-1], start, end - 1) if len(solved) > 1 else ())
        for start, end, replicas in solved[-1].trace(i, j)
    )
