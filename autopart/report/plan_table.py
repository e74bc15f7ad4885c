"""The stage table of a plan, with the modules of each stage: drawn, and as data for commands with --json."""

from __future__ import annotations

import math
from dataclasses import asdict

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


def plan_facts(plan: Plan, graph: Graph | None = None) -> dict[str, object]:
    """Return the content of `stage_table` in nanoseconds, bytes and numbers that are not rounded.

    graph: the captured graph the plan is for; adds the modules and the number of parameters of each stage.
    """
    return {
        "schedule": plan.schedule,
        "micro_rows": plan.micro_rows,
        "token_slices": plan.decision.token_slices,
        "world": plan.decision.world,
        "zero": plan.decision.zero,
        "copies": plan.decision.copies,
        "stages": [_stage(plan, s, graph) for s in range(len(plan.stages))],
        "step_ns": plan.step_ns,
        "bubble": plan.outlook.bubble,
        "costs": plan.provenance.costs,
        "optimality": asdict(plan.outlook.optimality) if plan.outlook.optimality is not None else None,
        "alternatives": [asdict(other) for other in plan.outlook.alternatives],
        "notes": plan.notes,
    }


def _stage(plan: Plan, s: int, graph: Graph | None) -> dict[str, object]:
    stage = plan.stages[s]
    facts: dict[str, object] = {"stage": s, "ranks": stage.ranks, "ops": len(stage.ops)}
    if modules := modules_of(plan, graph)[s]:
        facts["modules"] = module_range(modules)
    if graph is not None:
        facts["params"] = parameter_count(graph, set(stage.ops))
    facts["recomputed"] = sum(map(len, stage.recompute))
    facts["forward_only"] = stage.forward_only
    if plan.estimates:
        facts |= asdict(plan.estimates[s])
    return facts
