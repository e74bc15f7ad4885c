"""Costs at any number of rows on any kind of device, from costs at one.

An op's analytic cost (`rules`) is computed anew for every number of rows and kind; what was measured once corrects it
by a factor for each op, forward and backward.  Wrong where the error of the analytic cost depends on the size: the
plan that is chosen is costed again at its own number of rows (`planning`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from autopart.ir.cluster import Device
from autopart.ir.cost import Cost
from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph
from autopart.passes.rules import analytic_costs
from autopart.passes.scale import at_rows

CostsAt = Callable[[int, int], Graph]
"""(rows, kind of device) to the captured graph at that number of rows, with costs on that kind."""


def sheets(graph: Graph, other: Graph | None, kinds: tuple[Device, ...]) -> CostsAt:
    """Costs of `graph`, which has those at its own rows on kinds[0], at other rows and on other kinds.

    other: a capture of the same model at another number of rows; without one, only the rows of `graph` are known.
    Each answer is computed once: O(ops + values).
    """
    base = analytic_costs(graph, kinds[0])
    factors = [
        (_ratio(op.cost.fwd_ns, plain.cost.fwd_ns), _ratio(op.cost.bwd_ns, plain.cost.bwd_ns))
        for op, plain in zip(graph.ops, base.ops, strict=True)
    ]
    exact = all(factor == (1.0, 1.0) for factor in factors)

    @lru_cache(maxsize=64)
    def costs_at(rows: int, kind: int) -> Graph:
        if rows == graph.rows and kind == 0:
            return graph
        grown = graph if rows == graph.rows else at_rows(graph, other, rows) if other is not None else None
        if grown is None:
            raise GraphError(f"the program at {rows} rows is not known from the one at {graph.rows}")
        plain = analytic_costs(grown, kinds[kind])
        if exact:
            return plain
        return replace(
            plain,
            ops=tuple(
                replace(op, cost=_scaled(op.cost, factor)) for op, factor in zip(plain.ops, factors, strict=True)
            ),
        )

    return costs_at


def _ratio(known: int, counted: int) -> float:
    return known / counted if counted else 1.0


def _scaled(cost: Cost, factor: tuple[float, float]) -> Cost:
    return replace(cost, fwd_ns=int(cost.fwd_ns * factor[0]), bwd_ns=int(cost.bwd_ns * factor[1]))
