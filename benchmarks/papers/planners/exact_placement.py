"""Exact placement of a DAG on machines with OR-Tools CP-SAT: the problem of `placement`, solved and proved.

With x[v, p] = 1 when item v is on machine p:

    minimise L
    sum_p x[v, p] = 1;   x[v, p] = 0 where v cannot run
    sum_v size_v x[v, p] <= memory_p
    c[m, p] >= x[u, p] - x[v, p],  c[m, p] >= x[v, p] - x[u, p]     for a message m from u to each of its readers v
    sum_v time_v x[v, p] + sum_m cost_m c[m, p] <= L                 without the second sum where p does not pay

Contiguous (dnn-partitioning, NeurIPS 2020, figure 6, uses a z per node and device): here the machines are in a row
instead, and g[v, q] = 1 when v is at position q or later,

    g[v, q + 1] <= g[v, q];   g[u, q] <= g[v, q] on each edge (u, v);   x[v, q] = g[v, q] - g[v, q + 1]

which is equivalent, has no symmetry among equal machines, and also forbids a cycle of three machines. The type of
machine at each position is a further choice h[q, group]; for a group other than the largest it relaxes the constraints
of its position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
from ortools.sat.python import cp_model

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Optimality
from autopart.passes.proof.exact import proved_bound
from benchmarks.papers.planners.placement import (
    NEVER,
    Machine,
    Message,
    Placement,
    Problem,
    check,
    is_contiguous,
    loads,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a search. seconds: wall clock; workers: threads. One number of workers always gives one answer, unless
    the clock stops the search."""

    seconds: float = 60.0
    workers: int = 1


def place(
    problem: Problem,
    *,
    contiguous: bool = True,
    hint: Sequence[int] | None = None,
    limits: Limits | None = None,
) -> Placement:
    """Return the best placement found and what is proved about it.

    hint: machine of each item, such as `place_in_order` finds; it bounds the search and is returned if time runs out
    before a better one is found. Raises UsageError if the hint is not feasible, and InfeasibleError if no placement is
    found, with a reason that tells whether one may exist.
    """
    limits = limits or Limits()
    check(problem)
    if hint is not None:
        flows_back = contiguous and not is_contiguous(problem, hint)
        if flows_back or max(loads(problem, hint)) >= NEVER:
            raise UsageError(
                "the hint is not a feasible placement",
                why="an item cannot run on its machine, or an edge goes backwards",
            )
    program = _PlacementProgram(problem, contiguous=contiguous)
    if hint is not None:
        program.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.interleave_search = limits.workers > 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limits.seconds
    status = solver.solve(program.cp)
    bound = proved_bound(solver)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        machine_of = program.answer(solver)
        return Placement(machine_of, Optimality.of(max(loads(problem, machine_of)), bound))
    if hint is not None and status == cp_model.UNKNOWN:
        return Placement(tuple(hint), Optimality.of(max(loads(problem, hint)), bound))
    if status == cp_model.INFEASIBLE:
        raise InfeasibleError(
            "no placement fits the machines", why="proved: sizes and machines leave no way to place the items"
        )
    raise InfeasibleError(
        "no placement was found in time", why=f"the limit was {limits.seconds:g} s", fix="give more seconds, or a hint"
    )


class _PlacementProgram:
    """The constraint program of the module docstring. x: by item and position; h: by position and group of machines."""

    def __init__(self, problem: Problem, *, contiguous: bool) -> None:
        self.problem = problem
        self.contiguous = contiguous
        self.cp = cp_model.CpModel()
        self.groups = list(Counter(problem.machines).items())
        self.positions = range(len(problem.machines))
        self.x = [[self.cp.new_bool_var("") for _ in self.positions] for _ in problem.sizes]
        self.h = [[self.cp.new_bool_var("") for _ in self.groups] for _ in self.positions]
        self.g = [self._later(row) for row in self.x] if contiguous else []
        self.c = [[self._cut(message, q) for q in self.positions] for message in problem.messages]
        self.objective = self.cp.new_int_var(0, self._upper_bound(), "")
        for row in self.x:
            self.cp.add_exactly_one(row)
        self._place_groups()
        for q in self.positions:
            self._bound_load(q)
        if contiguous:
            for u, v in problem.edges:
                for before, after in zip(self.g[u], self.g[v], strict=True):
                    self.cp.add_implication(before, after)
        self.cp.minimize(self.objective)

    def _upper_bound(self) -> int:
        """Return an upper bound of all loads: the slowest type of machine for every item, plus all messages."""
        slowest = [max(_known(times), default=0) for times in zip(*self.problem.times, strict=True)]
        return sum(slowest) + sum(message.cost for message in self.problem.messages)

    def _later(self, row: list[cp_model.IntVar]) -> list[cp_model.IntVar]:
        """Return g of one item at positions 1..n - 1, linked to its x."""
        later = [self.cp.new_bool_var("") for _ in row[1:]]
        for q, stands_here in enumerate(row):
            here_or_later = later[q - 1] if q > 0 else 1
            further = later[q] if q < len(later) else 0
            self.cp.add(stands_here == here_or_later - further)
        return later

    def _place_groups(self) -> None:
        """Constrain the group at each position: the machine itself, or any machine of the row."""
        for q, row in zip(self.positions, self.h, strict=True):
            self.cp.add_exactly_one(row)
            if not self.contiguous:
                self.cp.add(row[self._group(q)] == 1)
        for (_, count), column in zip(self.groups, zip(*self.h, strict=True), strict=True):
            self.cp.add(sum(column) == count)

    def _group(self, machine: int) -> int:
        return next(g for g, (alike, _) in enumerate(self.groups) if alike == self.problem.machines[machine])

    def _cut(self, message: Message, q: int) -> cp_model.IntVar:
        """Return c, at least 1 if the message touches the position and the machine there pays for messages."""
        cut = self.cp.new_bool_var("")
        free = [h for h, (machine, _) in zip(self.h[q], self.groups, strict=True) if not machine.pays]
        writer = self.x[message.items[0]][q]
        for reader in dict.fromkeys(message.items[1:]):
            if reader != message.items[0]:
                self.cp.add_bool_or(~writer, self.x[reader][q], cut, *free)
                self.cp.add_bool_or(writer, ~self.x[reader][q], cut, *free)
        return cut

    def _bound_load(self, q: int) -> None:
        """Add one bound that holds for all groups, and the excess of each group."""
        items = [row[q] for row in self.x]
        cuts = sum(m.cost * row[q] for m, row in zip(self.problem.messages, self.c, strict=True))
        fastest = [min(_known(times), default=0) for times in zip(*self.problem.times, strict=True)]
        work = sum(t * stands_here for t, stands_here in zip(fastest, items, strict=True))
        self.cp.add(work + cuts <= self.objective)
        for (machine, _), here in zip(self.groups, self.h[q], strict=True):
            self._bound_group(machine, here, items, cuts, fastest)

    def _bound_group(
        self,
        machine: Machine,
        here: cp_model.IntVar,
        items: list[cp_model.IntVar],
        cuts: cp_model.LinearExpr | int,
        fastest: list[int],
    ) -> None:
        times = self.problem.times[machine.kind]
        if list(times) != fastest:
            for time, stands_here in zip(times, items, strict=True):
                if time is None:
                    self.cp.add_implication(here, ~stands_here)
            work = sum((time or 0) * stands_here for time, stands_here in zip(times, items, strict=True))
            load = work + cuts if machine.pays else work
            self.cp.add(load <= self.objective).only_enforce_if(here)
        if machine.memory_bytes is not None and sum(self.problem.sizes) > machine.memory_bytes:
            size = sum(s * stands_here for s, stands_here in zip(self.problem.sizes, items, strict=True))
            self.cp.add(size <= machine.memory_bytes).only_enforce_if(here)

    def hint(self, machine_of: Sequence[int]) -> None:
        """Start from this placement and search only for ones that are not worse."""
        order = self._machines_in_row(machine_of) if self.contiguous else list(self.positions)
        position_of = {machine: q for q, machine in enumerate(order)}
        for item, machine in enumerate(machine_of):
            for q in self.positions:
                self.cp.add_hint(self.x[item][q], q == position_of[machine])
            if self.contiguous:
                for q, later in enumerate(self.g[item]):
                    self.cp.add_hint(later, position_of[machine] > q)
        for q, machine in enumerate(order):
            for group, here in enumerate(self.h[q]):
                self.cp.add_hint(here, group == self._group(machine))
            for message, row in zip(self.problem.messages, self.c, strict=True):
                touched = {machine_of[i] == machine for i in message.items}
                self.cp.add_hint(row[q], len(touched) == 2 and self.problem.machines[machine].pays)
        largest = max(loads(self.problem, machine_of))
        self.cp.add_hint(self.objective, largest)
        self.cp.add(self.objective <= largest)

    def _machines_in_row(self, machine_of: Sequence[int]) -> list[int]:
        flow = nx.DiGraph(
            (machine_of[u], machine_of[v]) for u, v in self.problem.edges if machine_of[u] != machine_of[v]
        )
        flow.add_nodes_from(self.positions)
        return list(nx.lexicographical_topological_sort(flow))

    def answer(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Return the machine of each item. Equal machines are assigned in order along the row."""
        left = {g: [i for i in self.positions if self._group(i) == g] for g in range(len(self.groups))}
        machine_at = []
        for q, row in zip(self.positions, self.h, strict=True):
            group = next(g for g, here in enumerate(row) if solver.boolean_value(here))
            machine_at.append(left[group].pop(0) if self.contiguous else q)
        positions = [next(q for q, here in enumerate(row) if solver.boolean_value(here)) for row in self.x]
        return tuple([machine_at[q] for q in positions])


def _known(times: Sequence[int | None]) -> list[int]:
    return [time for time in times if time is not None]
