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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
from ortools.sat.python import cp_model

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.passes.placement import NEVER, Message, Optimality, Placement, Problem, check, is_contiguous, loads


@dataclass(frozen=True, slots=True)
class Limits:
    """seconds: wall clock, never exceeded by more than the time to build the model; workers: threads.

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
