"""The best pipeline over all orders of a DAG, with OR-Tools CP-SAT; the only importer of ortools.

Minimises Z of `certificate` over all ways to put the items of the DAG on positions 0..S-1, so that no edge goes back
and no position is empty or too full.  g[v, q] = 1 when item v stands at position q or later, x[v, q] when it stands at
q; t are the items of the critical path; y_q = L_q b_q; o_q is the most that can stand at q beside the critical path
(items that some cut between neighbours of the path has on neither side):

    g[v, q + 1] <= g[v, q];   g[u, q] <= g[v, q] on each edge (u, v);   x[v, q] = g[v, q] - g[v, q + 1]
    sum_v x[v, q] >= 1;   b_q >= x[t, q];   y_q >= L_q - o_q (1 - b_q);   y_q >= sum_t times[q][t] x[t, q]
    m L_q <= Z;   sum_{r < q} y_r + m y_q <= Z;   sizes at q <= memory_q

The order by g has no symmetry among equal positions (dnn-partitioning, NeurIPS 2020, figure 6, uses another variable
per node and device).  The relaxation alone gives Z >= T m^S / (m^S - (m - 1)^S), T the time of the critical path, which
is returned at once when no time is left.  n S Booleans, (n + edges) S + S^2 constraints; the problem is NP-hard
(partition), so the search is exponential at worst, but every bound that it returns holds: the solver's bound is of
integers, so nothing is lost to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from ortools.sat.python import cp_model

from autopart.ir.plan import Optimality
from autopart.passes.proof.certificate import (
    PipelineModel,
    critical_path,
    lower_bound_ns,
    off_path_slack_ns,
    relaxation_bound_ns,
)

Amount = cp_model.LinearExpr | int

SAFE = 1 << 48
"""The limit of the solver's integers; larger times are counted in larger units, rounded down."""


def certify(model: PipelineModel, hint: Sequence[int], seconds: float) -> tuple[tuple[int, ...], Optimality]:
    """Return the pipeline with the least Z (`certificate`) over all orders of the DAG, and the proved bound.

    Every position holds at least one item.  hint: a pipeline that fits, as the position of each item; it bounds the
    search and is the answer if nothing better is found in time.  seconds: wall clock, with the building of the model.
    No pipeline of these items takes less than the bound for a step, whatever its schedule.  The same every time, unless
    the clock stops the search.
    """
    deadline = time.monotonic() + seconds
    path, most_ns = critical_path(model), lower_bound_ns(model, hint)
    unit = max(1, -(-most_ns // SAFE))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.cp_model_probing_level = 0  # more of either takes seconds, and shortens no search here
    solver.parameters.max_presolve_iterations = 1
    program = _PipelineProgram(model, path, unit, most_ns)
    found, bound = tuple(hint), 0
    if program.build(deadline):
        program.hint(hint)
        solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
        status, bound = solver.solve(program.cp), proved_bound(solver)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # rounded to units, they may seem equal
            found = min(found, program.answer(solver), key=lambda position: lower_bound_ns(model, position))
    bound = max(bound * unit, relaxation_bound_ns(model, path))
    return found, Optimality.of(lower_bound_ns(model, found), bound)


def proved_bound(solver: cp_model.CpSolver) -> int:
    """Return the proved lower bound of the objective, which is a non-negative integer."""
    return ceil(max(0.0, solver.best_objective_bound) - 1e-6)


class _PipelineProgram:
    """The constraint program of the module docstring: g by item and position; everything else follows from it."""

    def __init__(self, model: PipelineModel, path: Sequence[int], unit: int, most_ns: int) -> None:
        """unit: nanoseconds of one of the solver's units.  most_ns: an upper bound of Z."""
        self.model = model
        self.path = path
        self.unit = unit
        self.cp = cp_model.CpModel()
        self.last = len(model.times) - 1
        self.later: list[list[cp_model.IntVar]] = []  # g of each item at positions 1..S - 1
        self.objective = self.cp.new_int_var(0, most_ns // unit, "")

    def build(self, deadline: float) -> bool:
        """Add every variable and constraint; return False if the deadline comes first."""
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
        """Return the sum of the weights of the items at position q: those at q or later less those later."""
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
        """Bound Z by the time of each position and of the path on it; keep positions from being empty or too full."""
        micros, times = self.model.micros, self._times()
        paces: list[Amount] = []  # y
        for q, slack in enumerate(off_path_slack_ns(self.model, self.path)):
            self.cp.add(self._sum_at(q, [1] * len(self.later)) >= 1)
            memory, need = (
                self.model.memory_bytes[q],
                [self.model.need_bytes(q, item) for item in range(len(self.later))],
            )
            if sum(need) > memory:  # larger needs are cut off there, which keeps the numbers small
                self.cp.add(self._sum_at(q, [min(size, memory + 1) for size in need]) <= memory)
            paces.append(self._pace_at(q, times[q], slack // self.unit))
            self.cp.add(micros * times[q] <= self.objective)
            self.cp.add(sum(paces[:q]) + micros * paces[q] <= self.objective)
            if time.monotonic() > deadline:
                return False
        return True

    def _times(self) -> list[Amount]:
        """Return L of each position; if all are alike, as differences of the sums at a position or later."""
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

    def _pace_at(self, q: int, time: Amount, slack: int) -> Amount:
        """Return y of position q."""
        if len(self.path) == len(self.later):
            return time
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
        return pace

    def hint(self, position_of: Sequence[int]) -> None:
        """Start from this pipeline."""
        for row, position in zip(self.later, position_of, strict=True):
            for q, later in enumerate(row, start=1):
                self.cp.add_hint(later, position >= q)

    def answer(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Return the position of each item: the number of positions before it."""
        return tuple([sum([1 for later in row if solver.boolean_value(later)]) for row in self.later])
