"""One set of costs, by which the plan that runs and those that may follow it are judged.

Measured again while a device is slow, ops would take as long as the machine lets them at that moment, and two plans
would differ by that alone.  So where devices have become slower, or faster, nothing is measured: the times under which
the plan that runs was made are extended to other sizes, and to devices of other speeds, as the planner does
(`passes.ops.cost_model`).  Where they are not known, since that plan was given or layers have frozen since, ops are
measured once at the moment: both plans are then wrong by the same factor.
"""

from __future__ import annotations

from dataclasses import replace

from autopart.capture import Captured
from autopart.costs.sources import CostedGraph, CostSource, costed
from autopart.ir.cluster import Device
from autopart.passes.ops.cost_model import CostModel


def known_costs(known: CostedGraph, device: Device, otherwise: str | CostSource) -> CostSource:
    """Return a source of costs that extends `known` and measures nothing.

    known: costs of the program at one size on `device`.  otherwise: the source for other programs than that.
    """
    digest = known.graph.structure_digest()

    def source(captured: Captured, on: Device) -> CostedGraph:
        graph = captured.graph
        if graph.structure_digest() != digest:
            return costed(captured, on, otherwise)
        other = None if graph.size == known.graph.size else graph
        costs = CostModel(known.graph, other, (device, on)).graph(graph.size, 1).ops
        ops = tuple(replace(op, cost=own.cost) for op, own in zip(graph.ops, costs, strict=True))
        return CostedGraph(replace(graph, ops=ops), known.source, known.notes)

    return source
