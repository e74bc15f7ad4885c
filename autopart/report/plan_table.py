"""Draw the stage table of a plan, with the modules of each stage."""

from __future__ import annotations

import math

from autopart.ir.explain import fitting_lines, footer, stage_grid, stage_row, terminal_width, total_row
from autopart.ir.graph import Graph, module_range, stage_modules
from autopart.ir.plan import Plan


def stage_table(plan: Plan, graph: Graph | None = None, *, width: int | None = None) -> str:
    """Return the stages of a plan as plain text, like `plan.explain`.

    graph: the captured graph of the plan; adds parameter counts, and modules to a plan without.  width: characters of a
    line, by default `terminal_width`; if lines would be wider, stages become columns.
    """
    rows = [stage_row(plan.decision, plan.outlook, s) for s in range(len(plan.stages))]
    modules = modules_of(plan, graph)
    if any(modules):
        rows = [_with(row, "ranks", "modules", module_range(own)) for row, own in zip(rows, modules, strict=True)]
    total = total_row(plan.decision, plan.outlook)
    if graph is not None:
        counts = [_count(parameter_count(graph, set(stage.ops))) for stage in plan.stages]
        rows = [_with(row, "ops", "params", count) for row, count in zip(rows, counts, strict=True)]
        total |= {"ops": str(len(graph.ops)), "params": _count(parameter_count(graph, {op.name for op in graph.ops}))}
    lines = fitting_lines(stage_grid(rows, total), width or terminal_width())
    return "\n".join([*lines, *footer(plan.decision, plan.outlook, plan.provenance.costs)]) + "\n"


def modules_of(plan: Plan, graph: Graph | None) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each stage: of the graph where it is known, else those that the plan names."""
    if graph is not None:
        return stage_modules([stage.ops for stage in plan.stages], graph)
    return tuple(stage.modules for stage in plan.stages)


def _with(row: dict[str, str], behind: str, name: str, cell: str) -> dict[str, str]:
    """Return the row of a stage with another cell behind the one of the column `behind`."""
    found: dict[str, str] = {}
    for column, known in row.items():
        found[column] = known
        if column == behind:
            found[name] = cell
    return found


def parameter_count(graph: Graph, ops: set[str]) -> int:
    """Return the number of elements of the parameters that these ops use, each parameter once."""
    used = {name for op in graph.ops if op.name in ops for name in op.params}
    return sum(math.prod(p.shape) for p in graph.params if p.name in used and p.kind == "param")


def _count(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
