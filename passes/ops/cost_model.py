"""Costs at any number of rows on any kind of device, from costs at one.

An op's analytic cost (`rules`) is computed anew for every number of rows and kind; what was measured once corrects it
by a factor for each op, forward and backward.  Wrong where the error of the analytic cost depends on the size: the
plan that is chosen is costed again at its own number of rows (`planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import Device
from autopart.ir.cost import Cost
from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph
from autopart.passes.ops.analytic_costs import Pricing
from autopart.passes.ops.resize import resize

CostsAt = Callable[[int, int], Graph]
"""(rows, kind of device) to the captured graph at that number of rows, with costs on that kind."""
Table = npt.NDArray[np.float64]
FIELDS = ("fwd_ns", "bwd_ns", "saved_bytes", "scratch_bytes", "flops")


class Sheets:
    """Costs of a graph, which has those at its own rows on kinds[0], at other rows and on other kinds: as a graph, and
    faster as a table."""

    def __init__(self, graph: Graph, other: Graph | None, kinds: tuple[Device, ...]) -> None:
        """other: a capture of the same model at another number of rows; without one, only the rows of `graph` are
        known."""
        self._graph, self._other, self._kinds = graph, other, kinds
        self._pricing = Pricing(graph, other or graph)
        self._classes = np.array(self._pricing.classes, dtype=np.int64)
        base = self._costs(graph.rows, 0)
        self._factors = [
            (_ratio(op.cost.fwd_ns, base[c].fwd_ns), _ratio(op.cost.bwd_ns, base[c].bwd_ns))
            for op, c in zip(graph.ops, self._pricing.classes, strict=True)
        ]
        self._exact = all(factor == (1.0, 1.0) for factor in self._factors)
        self._known = {(graph.rows, 0): graph}

    def __call__(self, rows: int, kind: int) -> Graph:
        """The graph at so many rows with costs on a kind of device, each made once.  O(ops + values)."""
        if (rows, kind) not in self._known:
            costs, grown = self._costs(rows, kind), self._grown(self._graph, self._other, rows)
            ops = self._pricing.put(costs, grown.ops)
            if not self._exact:
                pairs = zip(ops, self._factors, strict=True)
                ops = tuple([replace(op, cost=_scaled(op.cost, factor)) for op, factor in pairs])
            self._known[rows, kind] = replace(grown, ops=ops)
        return self._known[rows, kind]

    def table(self, rows: int, kind: int) -> tuple[Table, dict[str, int]]:
        """See `table_of`.  O(values), and O(ops) in numpy: classes of ops are priced, and no op is made."""
        if (rows, kind) == (self._graph.rows, 0):
            return _table(self._graph)
        columns = _columns(self._costs(rows, kind))[:, self._classes]
        if not self._exact:
            columns[:2] = np.floor(columns[:2] * np.array(self._factors).T)
        bare = replace(self._graph, ops=())
        grown = self._grown(bare, replace(self._other, ops=()) if self._other is not None else None, rows)
        return columns, {v.name: v.size_bytes for v in grown.values}

    def _costs(self, rows: int, kind: int) -> list[Cost]:
        known = self._other is not None or rows == self._graph.rows
        costs = self._pricing.costs(rows, self._kinds[kind]) if known else None
        if costs is None:
            raise self._unknown(rows)
        return costs

    def _grown(self, graph: Graph, other: Graph | None, rows: int) -> Graph:
        if rows == graph.rows:
            return graph
        grown = resize(graph, other, rows) if other is not None else None
        if grown is None:
            raise self._unknown(rows)
        return grown

    def _unknown(self, rows: int) -> GraphError:
        return GraphError(f"the program at {rows} rows is not known from the one at {self._graph.rows}")


def table_of(costs_at: CostsAt, rows: int, kind: int) -> tuple[Table, dict[str, int]]:
    """(a row for each of `FIELDS`, a column for each op; bytes of each value) at so many rows on a kind of device."""
    return costs_at.table(rows, kind) if isinstance(costs_at, Sheets) else _table(costs_at(rows, kind))


def _table(graph: Graph) -> tuple[Table, dict[str, int]]:
    return _columns([op.cost for op in graph.ops]), {v.name: v.size_bytes for v in graph.values}


def _columns(costs: Sequence[Cost]) -> Table:
    return np.array([[getattr(cost, field) for cost in costs] for field in FIELDS], dtype=np.float64)


def _ratio(known: int, counted: int) -> float:
    return known / counted if counted else 1.0


def _scaled(cost: Cost, factor: tuple[float, float]) -> Cost:
    return replace(cost, fwd_ns=int(cost.fwd_ns * factor[0]), bwd_ns=int(cost.bwd_ns * factor[1]))


def sheets(graph: Graph, other: Graph | None, kinds: tuple[Device, ...]) -> CostsAt:
    """Costs of `graph` at any rows on any kind (`Sheets`)."""
    return Sheets(graph, other, kinds)
