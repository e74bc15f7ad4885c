"""Costs at any size on any type of device, from costs at one.

An op's analytic cost (`analytic_costs`) is computed for every size and type of device; a measurement at one size
corrects it by factors for each op: of the forward, the backward and the saved bytes.  Wrong where the error of the
analytic cost depends on the size: the plan that is chosen is costed again at its own size (`planning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import Device
from autopart.ir.graph import Cost, Graph, Size
from autopart.passes.ops.analytic_costs import Pricing
from autopart.passes.ops.resize import resize
from autopart.passes.ops.weight_parts import with_weight_parts

FIELDS = tuple(field.name for field in fields(Cost))
"""The rows of a `CostTable`: fields of `Cost`."""
_CORRECTED = FIELDS[:3]
"""The fields that a measurement corrects; `weight_ns` is corrected as `bwd_ns`, which it is a part of."""
_BWD_NS, _WEIGHT_NS = FIELDS.index("bwd_ns"), FIELDS.index("weight_ns")


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of a graph without its ops.

    columns: a row for each of `FIELDS`, a column for each op.  value_bytes: of each value, by name.
    """

    columns: npt.NDArray[np.float64]
    value_bytes: dict[str, int]


class GraphCosts(Protocol):
    """Costs of a graph at any size on any type of device, which is a number of `stage_costs.device_types`."""

    def graph(self, size: Size, device_type: int) -> Graph:
        """The graph at this size, with costs on this type of device."""


class OpCosts(GraphCosts, Protocol):
    """Costs of a captured graph, also without making its ops."""

    def table(self, size: Size, device_type: int) -> CostTable:
        """The costs and sizes of values of `graph`."""


class CostModel:
    """The costs of a program from its graph, which has costs at its own size on the first type of device."""

    def __init__(self, graph: Graph, other: Graph | None, device_types: tuple[Device, ...]) -> None:
        """other: the program at another number of rows, which shows how it grows (`resize`).  O(size of the graph)."""
        self._other, self._device_types = other, device_types
        self._pricing = Pricing(graph, other or graph)
        self._classes = np.array(self._pricing.classes, dtype=np.int64)
        analytic = self._pricing.costs(graph.size, device_types[0])
        each = [analytic[number] for number in self._pricing.classes]
        self._graph = with_weight_parts(graph, self._pricing.weight_parts, each)
        known, computed = _columns([op.cost for op in self._graph.ops]), _columns(each)
        factors = np.divide(known, computed, out=np.ones_like(known), where=computed != 0)
        self._factors = factors[: len(_CORRECTED)]
        self._graphs = {(graph.size, 0): self._graph}

    def graph(self, size: Size, device_type: int) -> Graph:
        """See `GraphCosts`; each graph is made once.  O(ops + values).  Raises GraphError at a size not known."""
        key = size, device_type
        if key not in self._graphs:
            costs = self._costs(size, device_type).astype(np.int64).T.tolist()
            resized = resize(self._graph, self._other, size)
            ops = tuple([replace(op, cost=Cost(*cost)) for op, cost in zip(resized.ops, costs, strict=True)])
            self._graphs[key] = replace(resized, ops=ops)
        return self._graphs[key]

    def table(self, size: Size, device_type: int) -> CostTable:
        """See `OpCosts`.  O(values), and O(ops) in numpy.  Raises GraphError at a size not known."""
        if (size, device_type) == (self._graph.size, 0):
            return table_of(self._graph)
        twin = None if self._other is None else replace(self._other, ops=())
        values = resize(replace(self._graph, ops=()), twin, size).values
        return CostTable(self._costs(size, device_type), {value.name: value.size_bytes for value in values})

    def _costs(self, size: Size, device_type: int) -> npt.NDArray[np.float64]:
        columns = _columns(self._pricing.costs(size, self._device_types[device_type]))[:, self._classes]
        columns[: len(_CORRECTED)] = np.floor(columns[: len(_CORRECTED)] * self._factors)
        columns[_WEIGHT_NS] = np.floor(columns[_WEIGHT_NS] * self._factors[_BWD_NS])
        return columns


def table_of(graph: Graph) -> CostTable:
    """The costs of a graph as a table.  O(ops + values)."""
    return CostTable(_columns([op.cost for op in graph.ops]), {v.name: v.size_bytes for v in graph.values})


def _columns(costs: Sequence[Cost]) -> npt.NDArray[np.float64]:
    return np.array([[getattr(cost, field) for cost in costs] for field in FIELDS], dtype=np.float64)
