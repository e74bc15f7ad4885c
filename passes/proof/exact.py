"""The best pipeline over all orders of a DAG, with OR-Tools CP-SAT; the only importer of ortools.

Minimises Z of `pipeline_model` over all ways to put the items of the DAG on positions 0..S-1, so that no edge goes back
and no position is empty or too full.  g[v, q] = 1 when item v stands at position q or later, x[v, q] when it stands at
q; t are the items of the critical path; y_q = L_q b_q; o_q is the most that can stand at q beside the critical path
(items that some cut between neighbours of the path has on neither side):

    g[v, q + 1] <= g[v, q];   g[u, q] <= g[v, q] on each edge (u, v);   x[v, q] = g[v, q] - g[v, q + 1]
    sum_v x[v, q] >= 1;   b_q >= x[t, q];   y_q >= L_q - o_q (1 - b_q);   y_q >= sum_t times[q][t] x[t, q]
    m L_q + tail_q <= Z;   tail_p b_p + sum_{p <= r < q} y_r + m y_q <= Z;   sizes at q <= memory_q

The order by g has no symmetry among equal positions (dnn-partitioning, NeurIPS 2020, figure 6, uses another variable
per node and device).  The relaxation alone gives Z >= T m^S / (m^S - (m - 1)^S), T the time of the critical path, which
is returned at once when no time is left.  n S Booleans, (n + edges) S + S^2 constraints; the problem is NP-hard
(partition), so the search is exponential at worst, and what counts is that every bound it returns holds: the solver's
bound is of integers, so nothing is lost to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from ortools.sat.python import cp_model

from autopart.ir.errors import InfeasibleError
from autopart.ir.outlook import Optimality
from autopart.passes.proof.pipeline_model import (
    PipelineModel,
    critical_path,
    lower_bound_ns,
    off_path_slack_ns,
    relaxation_bound_ns,
    upper_bound_ns,
)

Amount = cp_model.LinearExpr | int

SAFE = 1 << 48
"""The solver's integers stay below; what is larger is counted in larger units, rounded down."""


@dataclass(frozen=True, slots=True)
class Limits:
    """seconds: wall clock, with the building of the model; workers: threads.

    The answer is the same every time for one number of workers, unless the clock stops the search.
    """

    seconds: float = 60.0
    workers: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Certified:
    """position[v]: where item v stands.  optimality: Z of that in nanoseconds, and what no pipeline is below."""

    position: tuple[int, ...]
    optimality: Optimality


def certify(model: PipelineModel, *, hint: Sequence[int] | None = None, limits: Limits | None = None) -> Certified:
    """The pipeline with the least Z (`pipeline_model`) over all orders of the DAG, and what is proved about it.

    Every position holds at least one item.  hint: position of each item; it bounds the search and is the answer when
    nothing better is found in time.  No pipeline of these items takes less than `optimality.lower_bound` for a step,
    whatever its schedule.  Raises UsageError when the hint is not a pipeline that fits or the model contradicts
    itself, InfeasibleError when no pipeline is found; it says whether none exists.
    """
    limits = limits or Limits()
    deadline = time.monotonic() + limits.seconds
    path = critical_path(model)
    most_ns = lower_bound_ns(model, hint) if hint is not None else upper_bound_ns(model)
    unit = max(1, -(-most_ns // SAFE))
    solver = new_solver(limits)
    solver.parameters.cp_model_probing_level = 0  # more of either takes seconds, and shortens no search here
    solver.parameters.max_presolve_iterations = 1
    program = _PipelineProgram(model, path, unit, most_ns)
    status, bound = cp_model.UNKNOWN, 0
    if program.build(deadline):
        if hint is not None:
            program.hint(hint)
        status, bound = _solve(solver, program.cp, deadline)
    bound = max(bound * unit, relaxation_bound_ns(model, path))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        position = program.answer(solver)
        found_ns = lower_bound_ns(model, position)
        if hint is None or found_ns <= most_ns:  # rounded to units, they may seem equal
            return Certified(position, Optimality.of(found_ns, bound))
    if hint is not None and status != cp_model.INFEASIBLE:
        return Certified(tuple(hint), Optimality.of(most_ns, bound))
    raise nothing_found(status, limits)


def new_solver(limits: Limits) -> cp_model.CpSolver:
    """A solver that gives the same answer every time; without a limit of time."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.interleave_search = limits.workers > 1
    solver.parameters.random_seed = limits.seed
    return solver


def proved_bound(solver: cp_model.CpSolver) -> int:
    """What the objective, of integers of at least 0, is proved not to be below."""
    return ceil(max(0.0, solver.best_objective_bound) - 1e-6)


def nothing_found(status: cp_model.CpSolverStatus, limits: Limits) -> InfeasibleError:
    """The error for a search without an answer."""
    if status == cp_model.INFEASIBLE:
        return InfeasibleError(
            "no placement fits the machines", why="proved: sizes and machines leave no way to place the items"
        )
    return InfeasibleError(
        "no placement was found in time",
        why=f"the limit was {limits.seconds:g} s",
        fix="give more seconds, or a hint",
    )


def _solve(
    solver: cp_model.CpSolver, program: cp_model.CpModel, deadline: float
) -> tuple[cp_model.CpSolverStatus, int]:
    """Status and bound of the objective, of what is found before the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        return cp_model.UNKNOWN, 0
    solver.parameters.max_time_in_seconds = left
    status = solver.solve(program)
    return status, proved_bound(solver)


class _PipelineProgram:
    """The constraint program of the module docstring: g by item and position, all else follows from it."""

    def __init__(self, model: PipelineModel, path: Sequence[int], unit: int, most_ns: int) -> None:
        """unit: nanoseconds of one of the solver's units.  most_ns: Z is not above."""
        self.model = model
        self.path = path
        self.unit = unit
        self.cp = cp_model.CpModel()
        self.last = len(model.times) - 1
        self.later: list[list[cp_model.IntVar]] = []  # g of each item at positions 1..S - 1
        self.objective = self.cp.new_int_var(0, most_ns // unit, "")

    def build(self, deadline: float) -> bool:
        """Add every variable and constraint.  False when the deadline comes first."""
        for _ in self.model.static_bytes:
            row = [self.cp.new_bool_var("") for _ in range(self.last)]
            self.later.append(row)
            for here, further in pairwise(row):
                self.cp.add_implication(further, here)
            if time.monotonic() > deadline:
                return False
        for u, v in self.model.edges:
            for before, after in zip(self.later[u], self.later[v], strict=True):
                self.cp.add_implication(before, after)
            if time.monotonic() > deadline:
                return False
        self.cp.minimize(self.objective)
        return self._bound_step(deadline)

    def _sum_at(self, q: int, weights: Sequence[int]) -> Amount:
        """Sum of the weights of the items at position q: of those at q or later, less those that stand later."""
        terms: list[cp_model.IntVar] = []
        coefficients: list[int] = []
        if q > 0:
            terms += [row[q - 1] for row in self.later]
            coefficients += weights
        if q < self.last:
            terms += [row[q] for row in self.later]
            coefficients += [-weight for weight in weights]
        at_first = sum(weights) if q == 0 else 0  # every item stands at position 0 or later
        return at_first + cp_model.LinearExpr.weighted_sum(terms, coefficients)

    def _bound_step(self, deadline: float) -> bool:
        """Z, from what each position takes and what of it lies on the path; no position empty or too full."""
        micros = self.model.micros
        tails = [tail // self.unit for tail in self.model.tail_ns]
        times = self._times()
        on_path: list[Amount] = []  # b
        paces: list[Amount] = []  # y
        for q, slack in enumerate(off_path_slack_ns(self.model, self.path)):
            self.cp.add(self._sum_at(q, [1] * len(self.later)) >= 1)
            self._limit_memory(q)
            on, pace = self._path_at(q, times[q], slack // self.unit)
            on_path.append(on)
            paces.append(pace)
            self.cp.add(micros * times[q] + tails[q] <= self.objective)
            for p in range(q + 1):
                if p == 0 or tails[p]:
                    self.cp.add(tails[p] * on_path[p] + sum(paces[p:q]) + micros * paces[q] <= self.objective)
            if time.monotonic() > deadline:
                return False
        return True

    def _times(self) -> list[Amount]:
        """L of each position; where all are alike, differences of what stands at a position or later."""
        rows = [[t // self.unit for t in row] for row in self.model.times]
        if any(row != rows[0] for row in rows):
            times = [self.cp.new_int_var(0, sum(row), "") for row in rows]
            for q, row in enumerate(rows):
                self.cp.add(times[q] == self._sum_at(q, row))
            return list(times)
        at_or_later: list[Amount] = [sum(rows[0])]
        for q in range(1, self.last + 1):
            at_or_later.append(self.cp.new_int_var(0, sum(rows[0]), ""))
            items = [row[q - 1] for row in self.later]
            self.cp.add(at_or_later[q] == cp_model.LinearExpr.weighted_sum(items, rows[0]))
        return [here - further for here, further in pairwise([*at_or_later, 0])]

    def _path_at(self, q: int, time: Amount, slack: int) -> tuple[Amount, Amount]:
        """b and y of position q."""
        if len(self.path) == len(self.later):
            return 1, time
        times = [t // self.unit for t in self.model.times[q]]
        on = self.cp.new_bool_var("")
        pace = self.cp.new_int_var(0, sum(times), "")
        for item in self.path:
            stands_before = [~self.later[item][q - 1]] if q > 0 else []
            stands_later = [self.later[item][q]] if q < self.last else []
            self.cp.add_bool_or(*stands_before, on, *stands_later)
        path = set(self.path)
        self.cp.add(pace >= self._sum_at(q, [t if item in path else 0 for item, t in enumerate(times)]))
        self.cp.add(pace >= time - slack + slack * on)
        return on, pace

    def _limit_memory(self, q: int) -> None:
        """Memory of position q; needs above it are cut off there, which keeps the numbers small."""
        memory = self.model.memory_bytes[q]
        need = [self.model.need_bytes(q, item) for item in range(len(self.later))]
        if sum(need) > memory:
            self.cp.add(self._sum_at(q, [min(size, memory + 1) for size in need]) <= memory)

    def hint(self, position_of: Sequence[int]) -> None:
        """Start from this pipeline."""
        for row, position in zip(self.later, position_of, strict=True):
            for q, later in enumerate(row, start=1):
                self.cp.add_hint(later, position >= q)

    def answer(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """The position of each item: how many positions it stands behind."""
        return tuple([sum([1 for later in row if solver.boolean_value(later)]) for row in self.later])
