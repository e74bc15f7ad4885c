"""Exact placement of a DAG with OR-Tools CP-SAT; the only importer of ortools.

The problem is that of `placement`.  With x[v, p] = 1 when item v stands on machine p:

    minimise L
    sum_p x[v, p] = 1;   x[v, p] = 0 where v cannot run
    sum_v size_v x[v, p] <= memory_p
    c[m, p] >= x[u, p] - x[v, p],  c[m, p] >= x[v, p] - x[u, p]     for a message m from u to each of its readers v
    sum_v time_v x[v, p] + sum_m cost_m c[m, p] <= L                 without the second sum where p does not pay

Contiguous (dnn-partitioning, NeurIPS 2020, figure 6, uses a z per node and device): here the machines stand in a line
instead, and g[v, q] = 1 when v stands at position q or later,

    g[v, q + 1] <= g[v, q];   g[u, q] <= g[v, q] on each edge (u, v);   x[v, q] = g[v, q] - g[v, q + 1]

which is as good as that, has no symmetry among equal machines, and also forbids a cycle of three machines.  Which kind
of machine stands at which position is a further choice h[q, group]; of a group other than the largest it relaxes the
constraints of its position.

Proof by the solver; its bound is of integers, so nothing is lost to rounding.

Certificate of a synchronous pipeline (`certify`): Z of `placement`, minimised over all orders of the DAG.  With
x, g as above for the line, y_q = L_q b_q, and o_q the most that can stand at q beside the trunk (items that some cut
between neighbours of the trunk has on neither side); t are the items of the trunk:

    sum_v x[v, q] >= 1;   b_q >= x[t, q];   y_q >= L_q - o_q (1 - b_q);   y_q >= sum_t times[q][t] x[t, q]
    m L_q + tail_q <= Z;   tail_p b_p + sum_{p <= r < q} y_r + m y_q <= Z;   sizes at q <= memory_q

Its relaxation alone gives Z >= T m^S / (m^S - (m - 1)^S), T the time of the trunk, which is returned at once when no
time is left.  n S Booleans, (n + edges) S + S^2 constraints; the problem is NP-hard (partition), so the search is
exponential at worst, and what counts is that every bound it returns holds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
from ortools.sat.python import cp_model

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Optimality
from autopart.passes.proof.placement import (
    NEVER,
    Message,
    PipelineModel,
    Placement,
    Problem,
    beside_ns,
    ceiling_ns,
    check,
    critical_path,
    is_contiguous,
    least_ns,
    loads,
    relaxation_bound_ns,
)

__all__ = ["Limits", "PipelineModel", "certify", "least_ns", "place"]


@dataclass(frozen=True, slots=True)
class Limits:
    """seconds: wall clock, with the building of the model; workers: threads.

    The answer is the same every time for one number of workers, unless the clock stops the search.
    """

    seconds: float = 60.0
    workers: int = 1
    seed: int = 0


def place(
    problem: Problem,
    *,
    contiguous: bool = True,
    hint: Sequence[int] | None = None,
    limits: Limits | None = None,
) -> Placement:
    """The best placement found, and what is proved about it.

    hint: machine of each item, such as `place_line` finds; it bounds the search and is the answer when time runs out
    before a better one is found.  Raises UsageError when it is no placement, InfeasibleError when none is found: why
    tells whether none exists.
    """
    limits = limits or Limits()
    if hint is not None and (max(loads(check(problem), hint)) >= NEVER or contiguous > is_contiguous(problem, hint)):
        raise UsageError("the hint is no placement that may be", why="an item cannot stand there, or flow goes back")
    model = _Model(check(problem), contiguous=contiguous)
    if hint is not None:
        model.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limits.seconds
    solver.parameters.num_workers = limits.workers
    solver.parameters.interleave_search = limits.workers > 1
    solver.parameters.random_seed = limits.seed
    status = solver.solve(model.cp)
    bound = ceil(max(0.0, solver.best_objective_bound) - 1e-6)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        where = model.answer(solver)
        return Placement(where, Optimality.of(max(loads(problem, where)), bound))
    if hint is not None and status == cp_model.UNKNOWN:
        return Placement(tuple(hint), Optimality.of(max(loads(problem, hint)), bound))
    proved = status == cp_model.INFEASIBLE
    raise InfeasibleError(
        "no placement fits the machines" if proved else "no placement was found in time",
        why="proved: sizes and machines leave no way" if proved else f"the limit was {limits.seconds:g} s",
        fix="" if proved else "give more seconds, or a hint",
    )


FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _solver(limits: Limits) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.interleave_search = limits.workers > 1
    solver.parameters.random_seed = limits.seed
    return solver


def _solve(solver: cp_model.CpSolver, cp: cp_model.CpModel, until: float) -> tuple[cp_model.CpSolverStatus, int]:
    """Status and bound of the objective, of what is found before the clock says `until`."""
    left = until - time.monotonic()
    if left <= 0:
        return cp_model.UNKNOWN, 0
    solver.parameters.max_time_in_seconds = left
    status = solver.solve(cp)
    return status, ceil(max(0.0, solver.best_objective_bound) - 1e-6)


def _none(status: cp_model.CpSolverStatus, limits: Limits) -> InfeasibleError:
    proved = status == cp_model.INFEASIBLE
    return InfeasibleError(
        "no placement fits the machines" if proved else "no placement was found in time",
        why="proved: sizes and machines leave no way" if proved else f"the limit was {limits.seconds:g} s",
        fix="" if proved else "give more seconds, or a hint",
    )


class _Model:
    """The CP-SAT model: x by item and position, h by position and group of equal machines."""

    def __init__(self, problem: Problem, *, contiguous: bool) -> None:
        self.problem, self.contiguous, self.cp = problem, contiguous, cp_model.CpModel()
        self.groups = list(Counter(problem.machines).items())
        self.spots = range(len(problem.machines))
        self.x = [[self.cp.new_bool_var("") for _ in self.spots] for _ in problem.sizes]
        self.h = [[self.cp.new_bool_var("") for _ in self.groups] for _ in self.spots]
        self.g = [self._line(row) for row in self.x] if contiguous else []
        self.c = [[self._cut(message, spot) for spot in self.spots] for message in problem.messages]
        self.worst = self.cp.new_int_var(0, self._ceiling(), "")
        for row in self.x:
            self.cp.add_exactly_one(row)
        self._stand()
        for spot in self.spots:
            self._load(spot)
        for u, v in problem.edges if contiguous else ():
            for before, after in zip(self.g[u], self.g[v], strict=True):
                self.cp.add_implication(before, after)
        self.cp.minimize(self.worst)

    def _ceiling(self) -> int:
        """No load is above it: the slowest kind for every item, and all messages."""
        slowest = sum(
            max((t for t in times if t is not None), default=0) for times in zip(*self.problem.times, strict=True)
        )
        return slowest + sum(message.cost for message in self.problem.messages)

    def _line(self, row: list[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """g of one item at positions 1..n - 1, tied to its x."""
        later = [self.cp.new_bool_var("") for _ in row[1:]]
        for q, on in enumerate(row):
            at, past = (later[q - 1] if q else 1), (later[q] if q < len(later) else 0)
            self.cp.add(on == at - past)
        return later

    def _stand(self) -> None:
        """Which group stands where: the machine itself, or any machine of the line."""
        for spot, row in zip(self.spots, self.h, strict=True):
            self.cp.add_exactly_one(row)
            if not self.contiguous:
                self.cp.add(row[self._group(spot)] == 1)
        for (_, count), column in zip(self.groups, zip(*self.h, strict=True), strict=True):
            self.cp.add(sum(column) == count)

    def _group(self, machine: int) -> int:
        return next(g for g, (kind, _) in enumerate(self.groups) if kind == self.problem.machines[machine])

    def _cut(self, message: Message, spot: int) -> cp_model.IntVar:
        """c: at least 1 when the message touches the position and a machine that pays stands there."""
        cut = self.cp.new_bool_var("")
        free = [h for h, (machine, _) in zip(self.h[spot], self.groups, strict=True) if not machine.pays]
        writer = self.x[message.items[0]][spot]
        for reader in dict.fromkeys(message.items[1:]):
            if reader != message.items[0]:
                self.cp.add_bool_or(~writer, self.x[reader][spot], cut, *free)
                self.cp.add_bool_or(writer, ~self.x[reader][spot], cut, *free)
        return cut

    def _load(self, spot: int) -> None:
        """One bound that holds for all groups, and for each group what is more than that."""
        items = [row[spot] for row in self.x]
        cuts = sum(m.cost * row[spot] for m, row in zip(self.problem.messages, self.c, strict=True))
        least = [min((t for t in times if t is not None), default=0) for times in zip(*self.problem.times, strict=True)]
        self.cp.add(sum(t * on for t, on in zip(least, items, strict=True)) + cuts <= self.worst)
        for (machine, _), here in zip(self.groups, self.h[spot], strict=True):
            times = self.problem.times[machine.kind]
            if list(times) != least:
                for on in (on for t, on in zip(times, items, strict=True) if t is None):
                    self.cp.add_implication(here, ~on)
                work = sum((t or 0) * on for t, on in zip(times, items, strict=True))
                self.cp.add(work + (cuts if machine.pays else 0) <= self.worst).only_enforce_if(here)
            if machine.memory_bytes is not None and sum(self.problem.sizes) > machine.memory_bytes:
                size = sum(s * on for s, on in zip(self.problem.sizes, items, strict=True))
                self.cp.add(size <= machine.memory_bytes).only_enforce_if(here)

    def hint(self, where: Sequence[int]) -> None:
        """Start from this placement and look for no worse one."""
        worst = max(loads(self.problem, where))
        stands = self._machines_in_line(where) if self.contiguous else list(self.spots)
        spot_of = {machine: spot for spot, machine in enumerate(stands)}
        for item, machine in enumerate(where):
            for spot in self.spots:
                self.cp.add_hint(self.x[item][spot], spot == spot_of[machine])
            for q, later in enumerate(self.g[item] if self.contiguous else ()):
                self.cp.add_hint(later, spot_of[machine] > q)
        for spot, machine in enumerate(stands):
            for g, here in enumerate(self.h[spot]):
                self.cp.add_hint(here, g == self._group(machine))
            for message, row in zip(self.problem.messages, self.c, strict=True):
                inside = {where[i] == machine for i in message.items}
                self.cp.add_hint(row[spot], len(inside) == 2 and self.problem.machines[machine].pays)
        self.cp.add_hint(self.worst, worst)
        self.cp.add(self.worst <= worst)

    def _machines_in_line(self, where: Sequence[int]) -> list[int]:
        flow = nx.DiGraph((where[u], where[v]) for u, v in self.problem.edges if where[u] != where[v])
        flow.add_nodes_from(self.spots)
        return list(nx.lexicographical_topological_sort(flow))

    def answer(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """The machine of each item: those of a group are used in their order, along the line."""
        left = {g: [i for i in self.spots if self._group(i) == g] for g in range(len(self.groups))}
        stands = []
        for spot, row in zip(self.spots, self.h, strict=True):
            group = next(g for g, here in enumerate(row) if solver.boolean_value(here))
            stands.append(left[group].pop(0) if self.contiguous else spot)
        return tuple(stands[next(q for q, on in enumerate(row) if solver.boolean_value(on))] for row in self.x)


# ---- the certificate of a pipeline ----------------------------------------------------------------------------------


def certify(line: PipelineModel, *, hint: Sequence[int] | None = None, limits: Limits | None = None) -> Placement:
    """The pipeline with the least Z (module docstring) over all orders of the DAG, and what is proved about it.

    Every position holds at least one item.  hint: position of each item; it bounds the search and is the answer when
    nothing better is found in time.  Placement: machine[v] is the position of v, `optimality.objective` the Z of that,
    and no pipeline of these items takes less than `optimality.lower_bound` for a step, whatever its schedule.
    Raises UsageError when the hint or the line contradicts itself, InfeasibleError as `place` does.
    """
    limits, started = limits or Limits(), time.monotonic()
    path = critical_path(line)
    worst = least_ns(line, hint) if hint is not None else ceiling_ns(line)
    unit = -(-worst // SAFE) or 1
    status: cp_model.CpSolverStatus = cp_model.UNKNOWN
    solver, model, bound = _solver(limits), _LineModel(line, path, unit, worst), 0
    solver.parameters.cp_model_probing_level = 0  # more of either takes seconds, and shortens no search here
    solver.parameters.max_presolve_iterations = 1
    if model.build(started + limits.seconds):
        if hint is not None:
            model.hint(hint)
        status, bound = _solve(solver, model.cp, started + limits.seconds)
    bound = max(bound * unit, relaxation_bound_ns(line, path))
    if status in FOUND:
        where = model.answer(solver)
        found = least_ns(line, where)
        if hint is None or found <= worst:  # rounded to units, they may seem equal
            return Placement(where, Optimality.of(found, bound))
    if hint is not None and status != cp_model.INFEASIBLE:
        return Placement(tuple(hint), Optimality.of(worst, bound))
    raise _none(status, limits)


Amount = cp_model.LinearExpr | int

SAFE = 1 << 48
"""The solver's integers stay below; what is larger is counted in larger units, rounded down."""


class _LineModel:
    """The CP-SAT model of the certificate: g by item and position, all else follows from it."""

    def __init__(self, line: PipelineModel, path: Sequence[int], unit: int, worst: int) -> None:
        self.line, self.path, self.unit, self.cp = line, path, unit, cp_model.CpModel()
        self.spots = range(len(line.times))
        self.g: list[list[cp_model.IntVar]] = []  # at positions 1..S - 1
        self.worst = self.cp.new_int_var(0, worst // unit, "")

    def build(self, until: float) -> bool:
        """False when the clock says `until` first."""
        for _ in self.line.static_bytes:
            row = [self.cp.new_bool_var("") for _ in self.spots[1:]]
            self.g.append(row)
            for here, later in pairwise(row):
                self.cp.add_implication(later, here)
            if time.monotonic() > until:
                return False
        for u, v in self.line.edges:
            for before, after in zip(self.g[u], self.g[v], strict=True):
                self.cp.add_implication(before, after)
            if time.monotonic() > until:
                return False
        self.cp.minimize(self.worst)
        return self._paces(until)

    def _sum(self, q: int, weights: Sequence[int]) -> Amount:
        """Of the items at position q: what stands at q or later less what stands later."""
        columns = [[row[k] for row in self.g] for k in (q - 1, q) if 0 <= k < len(self.spots) - 1]
        signs = [1] * (q > 0) + [-1] * (q < len(self.spots) - 1)
        terms = [sign * w for sign in signs for w in weights]
        flat = [g for column in columns for g in column]
        return (0 if q else sum(weights)) + cp_model.LinearExpr.weighted_sum(flat, terms)

    def _paces(self, until: float) -> bool:
        """Z, from what each position takes and what of it lies on the trunk; no position empty or too full."""
        micros, tails = self.line.micros, [tail // self.unit for tail in self.line.tail_ns]
        times = self._times()
        y: list[Amount] = []
        b: list[Amount] = []
        for q, beside in enumerate(beside_ns(self.line, self.path)):
            self.cp.add(self._sum(q, [1] * len(self.g)) >= 1)
            self._fits(q)
            on, pace = self._trunk_at(q, times[q], beside // self.unit)
            b.append(on)
            y.append(pace)
            self.cp.add(micros * times[q] + tails[q] <= self.worst)
            for p in (p for p in range(q + 1) if p == 0 or tails[p]):
                self.cp.add(tails[p] * b[p] + sum(y[p:q]) + micros * y[q] <= self.worst)
            if time.monotonic() > until:
                return False
        return True

    def _times(self) -> list[Amount]:
        """L of each position; where all are alike, differences of what stands at a position or later."""
        rows = [[t // self.unit for t in row] for row in self.line.times]
        if any(row != rows[0] for row in rows):
            whole = [self.cp.new_int_var(0, sum(row), "") for row in rows]
            for q, row in enumerate(rows):
                self.cp.add(whole[q] == self._sum(q, row))
            return list(whole)
        after: list[Amount] = [sum(rows[0])]
        for q in self.spots[1:]:
            after.append(self.cp.new_int_var(0, sum(rows[0]), ""))
            self.cp.add(after[q] == cp_model.LinearExpr.weighted_sum([g[q - 1] for g in self.g], rows[0]))
        return [here - later for here, later in pairwise([*after, 0])]

    def _trunk_at(self, q: int, time: Amount, beside: int) -> tuple[Amount, Amount]:
        """b and y of position q."""
        if len(self.path) == len(self.g):
            return 1, time
        row = [t // self.unit for t in self.line.times[q]]
        on, pace = self.cp.new_bool_var(""), self.cp.new_int_var(0, sum(row), "")
        for t in self.path:
            here = [~self.g[t][q - 1]] if q else []
            self.cp.add_bool_or(*here, on, *self.g[t][q : q + 1])
        own = set(self.path)
        self.cp.add(pace >= self._sum(q, [t if v in own else 0 for v, t in enumerate(row)]))
        self.cp.add(pace >= time - beside + beside * on)
        return on, pace

    def _fits(self, q: int) -> None:
        """Memory of position q; needs above it are cut off there, which keeps the numbers small."""
        memory = self.line.memory_bytes[q]
        need = [self.line.need_bytes(q, v) for v in range(len(self.g))]
        if sum(need) > memory:
            self.cp.add(self._sum(q, [min(n, memory + 1) for n in need]) <= memory)

    def hint(self, where: Sequence[int]) -> None:
        """Start from this pipeline."""
        for row, spot in zip(self.g, where, strict=True):
            for q, later in enumerate(row, start=1):
                self.cp.add_hint(later, spot >= q)

    def answer(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """The position of each item."""
        return tuple(sum(solver.boolean_value(later) for later in row) for row in self.g)
