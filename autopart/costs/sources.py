"""Sources of op costs: functions from a captured program and a device to its graph with costs.

`compile(..., costs=my_source)` takes any such function, and `register_cost_source` gives it a name for options and the
command line.  Planning calls a source once, for the captured number of rows and the first device of the cluster; costs
for other numbers of rows and other devices are extrapolated (`passes.ops.cost_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autopart.capture import Captured
from autopart.costs import measure
from autopart.costs.measure import measure_costs
from autopart.costs.profiler import affordable, profile_costs
from autopart.ir.cluster import Device
from autopart.ir.errors import GraphError, UsageError
from autopart.ir.graph import Cost, Graph, check_cost
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.casts import without_casts
from autopart.passes.ops.cost_model import CostModel
from autopart.runtime.heap import keep_freed_memory


@dataclass(frozen=True, slots=True)
class CostedGraph:
    """A captured graph whose ops have costs.

    source: name of the source in the plan; empty: the name under which it was called.  notes: for the plan.
    """

    graph: Graph
    source: str = ""
    notes: tuple[str, ...] = ()


CostSource = Callable[[Captured, Device], CostedGraph]
"""Returns captured.graph with a `Cost` on each op (nanoseconds, bytes and FLOPs at its number of rows) for the device.

Take what it does not measure, such as saved bytes, from `analytic_costs(captured.graph, device)`."""


def analytic(captured: Captured, device: Device) -> CostedGraph:
    """Estimate times from FLOPs and bytes and the rates that the device reaches."""
    return CostedGraph(analytic_costs(captured.graph, device), "analytic")


def measured(captured: Captured, device: Device) -> CostedGraph:
    """Measure times on this machine: in the running program if it can be run, else each op alone."""
    keep_freed_memory()  # as ranks do
    graph, notes = profile_costs(captured, device) or measure_costs(captured, device)
    return CostedGraph(without_casts(graph), "measured", notes)


def auto(captured: Captured, device: Device) -> CostedGraph:
    """Measure if this machine has such a device and the model has weights, else estimate."""
    here = device.device_type == "cpu" or torch.cuda.is_available()
    return measured(captured, device) if here and not captured.on_meta else analytic(captured, device)


COST_SOURCES: dict[str, CostSource] = {"auto": auto, "measured": measured, "analytic": analytic}
"""The sources with a name."""


def register_cost_source(name: str, source: CostSource) -> None:
    """Give a source a name.  Raises UsageError if the name is taken."""
    if COST_SOURCES.setdefault(name, source) is not source:
        raise UsageError(f"there is a cost source {name!r} already", fix="register yours under another name")


def source_for(source: str | CostSource, backend: str) -> str | CostSource:
    """Return the source whose times are those of the backend: compiled stages are measured as they run."""
    return "compiled" if backend == "inductor" and source in ("auto", "measured") else source


def costed(
    captured: Captured, device: Device, source: str | CostSource, known: CostedGraph | None = None
) -> CostedGraph:
    """Return the captured graph with costs from a source.  known: from the same source, of the program at another size.

    Raises UsageError if a user's source returns something else than the captured graph with costs.
    """
    if known is not None and source in ("auto", "measured") and _follow(known.graph, captured, device):
        return _scaled(known, captured, device)
    function = COST_SOURCES[source] if isinstance(source, str) else source
    name = source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
    found = function(captured, device)
    if function not in (analytic, measured, auto):
        _check(found, captured.graph, name)
    return replace(found, source=found.source or name)


def _follow(known: Graph, captured: Captured, device: Device) -> bool:
    """Return whether costs follow from known ones: at their size the program can be run, here that takes too long."""
    fast, slow = (affordable(analytic_costs(g, device), device, measure.BUDGET_S) for g in (known, captured.graph))
    return fast and not slow


def _scaled(known: CostedGraph, captured: Captured, device: Device) -> CostedGraph:
    """Return a captured graph with costs that follow from those at another size."""
    graph = captured.graph
    costs = CostModel(known.graph, graph, (device,)).graph(graph.size, 0).op_map()
    ops = tuple(replace(op, cost=costs[op.name].cost) for op in graph.ops)
    note = f"costs: those at {graph.size} follow from those at {known.graph.size}, since a run takes too long"
    return replace(known, graph=without_casts(replace(graph, ops=ops)), notes=(*known.notes, note))


def _check(found: object, captured: Graph, name: str) -> None:
    """Check that a user's source changed only costs, and that they are possible."""
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
            check_cost(op.cost)
        except GraphError as error:
            raise UsageError(
                f"cost source {name} gave op {op.name} an impossible cost",
                where=f"{op.target} in module {op.module} at {op.where}",
                why=error.what,
                fix="give nanoseconds, bytes and FLOPs as integers of at least 0",
            ) from error


def _without_costs(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, cost=Cost()) for op in graph.ops))
