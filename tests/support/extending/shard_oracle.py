"""The cheapest assignment of a graph to the ranks of a shard group, by CP-SAT over all ways to run each op.

x[op, way]; y[value, held, wanted] >= x[writer, held] + x[reader, wanted] - 1; z[param, cut] <= x[reader, cut]:

    minimise  sum x * work + sum y * exchange      where  sum of bytes of parameters * (1 - z (t - 1) / t) <= most
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from ortools.sat.python import cp_model

from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.graph import Graph
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.calls import Call, calls_of
from autopart.passes.shards.costs import GroupCosts
from autopart.passes.shards.factors import factors_of
from autopart.passes.shards.facts import row_digits
from autopart.passes.shards.states import COPY, CUT_KIND, WHOLE, State, passes
from autopart.passes.shards.strategies import NO_DIGIT, Strategy, strategies

UNIT = 100
"""Nanoseconds of one of the solver's units."""
SPARE = 1.15
"""How much more than 1 / t of all bytes of parameters a rank may hold."""


def held_bytes(graph: Graph, assignment: Assignment) -> float:
    """Return the bytes of parameters of a rank, as part of all of them."""
    cut = {p.name for p in graph.params if assignment.states[p.name].kind == CUT_KIND}
    total = sum(p.size_bytes for p in graph.params)
    return sum(p.size_bytes / (assignment.shards if p.name in cut else 1) for p in graph.params) / total


def total_ns(costs: GroupCosts) -> float:
    """Return the nanoseconds of all ops and exchanges of a graph, both ways."""
    table = costs.table(costs.graph_of_all.size, 0)
    return float(table.columns[:2].sum())


class Oracle:
    """The program of the module docstring.  rule: the costs of an assignment.  free: ops that may run in any way; the
    others run as in that assignment."""

    def __init__(self, graph: Graph, cluster: Cluster, shards: int, rule: GroupCosts, free: Collection[str]) -> None:
        self.graph, self.cluster, self.shards, self.rule = graph, cluster, shards, rule
        self.launch_ns = DEVICE_KINDS[cluster.kind].launch_ns
        self.cp = cp_model.CpModel()
        self.terms: list[Any] = []
        self.values, self.params = graph.value_map(), graph.param_map()
        self.held: dict[str, dict[State, list[Any]]] = {name: {WHOLE: [1], COPY: [1]} for name in graph.inputs}
        self.wanted: dict[str, dict[State, list[Any]]] = defaultdict(lambda: defaultdict(list))
        factors = factors_of(graph)
        rows = row_digits(graph, factors)
        for call in calls_of(graph):
            ways = [way for way in strategies(call, factors, shards) if way.digit not in rows]
            ruled = rule.assignment.strategies[call.op.name]
            self._op(call, ways if call.op.name in free else [way for way in ways if way.is_like(ruled)][:1])
        self._exchanges()
        self._parameters()
        self.cp.minimize(sum(self.terms))

    def _op(self, call: Call, ways: list[Strategy]) -> None:
        own, found = call.op, []
        work = self._work(own.name)
        chosen = self.rule.assignment.strategies[own.name]
        states: dict[str, dict[State, list[Any]]] = {name: defaultdict(list) for name in own.writes}
        reads: dict[tuple[str, State], list[Any]] = defaultdict(list)
        for way in ways:
            x = self.cp.new_bool_var("")
            found.append(x)
            self.cp.add_hint(x, way == chosen)
            self.terms.append(work[way.digit != NO_DIGIT] * x)
            for name, state in zip(own.writes, way.writes, strict=True):
                states[name][state].append(x)
            for name, state in set(zip(call.reads, way.reads, strict=True)):
                reads[name, state].append(x)
        self.cp.add_exactly_one(found)
        self.held |= states
        for (name, state), ways_of in reads.items():
            self.wanted[name][state].append(sum(ways_of))

    def _work(self, op: str) -> tuple[int, int]:
        """Return the cost of an op that is whole, and of one that is cut."""
        place = next(n for n, each in enumerate(self.graph.ops) if each.name == op)
        whole = self.graph.ops[place].cost
        parts = [max(ns // self.shards, min(ns, self.launch_ns)) for ns in (whole.fwd_ns, whole.bwd_ns)]
        return (whole.fwd_ns + whole.bwd_ns) // UNIT, sum(parts) // UNIT

    def _exchanges(self) -> None:
        link = self.cluster.levels[0].link
        for name, wanted in self.wanted.items():
            if name not in self.values:
                continue
            value = self.values[name]
            moved = value.size_bytes * (self.shards - 1) / self.shards * 1e9 / link.bytes_per_s
            given = name in self.graph.inputs
            for held, writers in self.held[name].items():
                for state, readers in wanted.items():
                    if held == state or (given and held != COPY):
                        continue
                    there, back = passes(held, state)
                    ns = sum((link.latency_ns + n * moved) for n in (there, back * value.grad) if n)
                    if not ns:
                        continue
                    y = self.cp.new_bool_var("")
                    self.terms.append(int(ns) // UNIT * y)
                    for reader in readers:
                        self.cp.add(y >= sum(writers) + reader - 1)

    def _parameters(self) -> None:
        """Parameters rest in a cut if all readers want it, and a rank has few bytes of them."""
        total, left = sum(p.size_bytes for p in self.graph.params), []
        for param in self.graph.params:
            cuts = []
            for state, readers in self.wanted.get(param.name, {}).items():
                users = [op for op in self.graph.ops if param.name in op.params]
                if state.kind == CUT_KIND and param.kind == "param" and len(readers) == len(users):
                    z = self.cp.new_bool_var("")
                    for reader in readers:
                        self.cp.add(z <= reader)
                    cuts.append(z)
            left.append(param.size_bytes * (self.shards - (self.shards - 1) * sum(cuts)))
            if cuts:
                self.cp.add_at_most_one(cuts)
        self.cp.add(sum(left) <= int(SPARE * total))

    def least_ns(self, seconds: float) -> tuple[float, float]:
        """Return the cost of the best assignment that is found, and a proven bound."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = seconds
        status = solver.solve(self.cp)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return solver.objective_value * UNIT, solver.best_objective_bound * UNIT
