"""Where the costs of ops come from: functions from a captured program and a device to its graph with costs.

Three are ours; `compile(..., costs=my_source)` takes any function of that form, and `register_cost_source` gives one a
name, by which options and command line know it.  Planning asks a source once for the captured number of rows, on the
cluster's first device; other numbers of rows and other devices follow from that (`passes.ops.cost_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autopart.capture import Captured
from autopart.costs.measure import measure_costs
from autopart.costs.profiler import profile_costs
from autopart.ir import cost as cost_ir
from autopart.ir.cluster import Device
from autopart.ir.errors import GraphError, UsageError
from autopart.ir.graph import Graph
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.casts import without_casts


@dataclass(frozen=True, slots=True)
class CostedGraph:
    """A captured graph whose ops have costs.

    source: what the plan says they come from; empty for the name under which the source was asked.  notes: lines for
    the plan's table.
    """

    graph: Graph
    source: str = ""
    notes: tuple[str, ...] = ()


CostSource = Callable[[Captured, Device], CostedGraph]
"""captured.graph with another `Cost` on its ops (nanoseconds, bytes and FLOPs at its number of rows) for the device.

What it leaves out of account, such as saved bytes, is best taken from `analytic_costs(captured.graph, device)`."""


def analytic(captured: Captured, device: Device) -> CostedGraph:
    """From operations and bytes against the rates that the device's kernels are said to reach."""
    return CostedGraph(analytic_costs(captured.graph, device), "analytic")


def measured(captured: Captured, device: Device) -> CostedGraph:
    """Timed on this machine: in the running program where it can be run whole, else each op alone."""
    graph, notes = profile_costs(captured, device) or measure_costs(captured, device)
    return CostedGraph(without_casts(graph), "measured", notes)


def auto(captured: Captured, device: Device) -> CostedGraph:
    """Measured where this machine has such a device and the model has weights, else analytic."""
    here = device.kind == "cpu" or torch.cuda.is_available()
    return measured(captured, device) if here and not captured.on_meta else analytic(captured, device)


GROUP_NS = {"cpu": 200_000, "cuda": 0}
"""Nanoseconds that a recomputed group takes beside its ops, in autograd and in Python, by kind of device: an order of
magnitude, measured around groups of one small op; on a GPU its host takes them, ahead of it."""
COST_SOURCES: dict[str, CostSource] = {"auto": auto, "measured": measured, "analytic": analytic}
"""The sources that are known by name."""


def register_cost_source(name: str, source: CostSource) -> None:
    """Make a source known by name.  Raises UsageError when the name is taken."""
    if COST_SOURCES.setdefault(name, source) is not source:
        raise UsageError(f"there is a cost source {name!r} already", fix="register yours under another name")


def costed(captured: Captured, device: Device, source: str | CostSource) -> CostedGraph:
    """The captured graph with costs from a source, given by name or itself.

    Raises UsageError when a user's source returns something else than the captured graph with costs.
    """
    function = COST_SOURCES[source] if isinstance(source, str) else source
    name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
    found = function(captured, device)
    if function not in (analytic, measured, auto):
        _check(found, captured.graph, name)
    return replace(found, source=found.source or name)


def _check(found: object, captured: Graph, name: str) -> None:
    """The passes rely on what they are given: costs of the wrong program would be a plan for the wrong program."""
    if not isinstance(found, CostedGraph):
        raise UsageError(
            f"cost source {name} returned a {type(found).__name__}",
            fix="return autopart.costs.sources.CostedGraph(graph), with the captured graph and costs on its ops",
        )
    if _without_costs(found.graph) != _without_costs(captured):
        raise UsageError(
            f"cost source {name} changed the program",
            why="only the costs of its ops may differ from the captured graph",
            fix="return replace(graph, ops=...) with replace(op, cost=...) for each op of captured.graph",
        )
    for op in found.graph.ops:
        try:
            cost_ir.check(op.cost)
        except GraphError as error:
            raise UsageError(
                f"cost source {name} gave op {op.name} an impossible cost",
                where=f"{op.target} in module {op.module} at {op.where}",
                why=error.what,
                fix="give nanoseconds, bytes and FLOPs as integers of at least 0",
            ) from error


def _without_costs(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, cost=cost_ir.Cost()) for op in graph.ops))
