"""Draw the stage table of a plan, with the modules of each stage if its graph is known."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter

from autopart.ir.explain import WIDTH, fitting_lines, footer, stage_grid, stage_row, total_row
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Plan


def stage_table(plan: Plan, graph: Graph | None = None, *, width: int | None = None) -> str:
    """Return the stages of a plan as plain text, like `plan.explain`.

    graph: the captured graph of the plan; adds module paths and parameter counts.  width: characters of a line, by
    default those of the terminal, else `WIDTH`; if lines would be wider, stages become columns.
    """
    rows = [stage_row(plan.decision, plan.report, s) for s in range(len(plan.stages))]
    total = total_row(plan.decision, plan.report)
    if graph is not None:
        rows = [_with_graph(row, plan, s, graph) for s, row in enumerate(rows)]
        total |= {"ops": str(len(graph.ops)), "params": _count(parameter_count(graph, {op.name for op in graph.ops}))}
    lines = fitting_lines(stage_grid(rows, total), width or terminal_width())
    return "\n".join([*lines, *footer(plan.decision, plan.report, plan.provenance.costs)]) + "\n"


def terminal_width() -> int:
    """Return the characters of a line of the terminal; `WIDTH` where there is none."""
    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def _with_graph(row: dict[str, str], plan: Plan, s: int, graph: Graph) -> dict[str, str]:
    """Return the row of a stage with its modules after its ranks and its parameters after its ops."""
    found: dict[str, str] = {}
    for name, cell in row.items():
        found[name] = cell
        if name == "ranks":
            found["modules"] = module_range(plan, s, graph)
        if name == "ops":
            found["params"] = _count(parameter_count(graph, set(plan.stages[s].ops)))
    return found


def module_range(plan: Plan, s: int, graph: Graph) -> str:
    """Return the first and the last module of a stage, such as "transformer.h.0 … transformer.h.3".

    A path ends at its first number, so that a layer is one module.  Ops that are in several stages are left out, unless
    the stage has no others.
    """
    copies = Counter(name for stage in plan.stages for name in stage.ops)
    mine = set(plan.stages[s].ops)
    ops = [op for op in graph.ops if op.name in mine]
    counted = [op for op in ops if copies[op.name] == 1] or ops
    paths = list(dict.fromkeys(_layer(op) for op in counted if op.module))
    if len(paths) <= 2:
        return ", ".join(paths)
    return f"{paths[0]} … {paths[-1]}"


def _layer(op: Op) -> str:
    parts = op.module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return op.module


def parameter_count(graph: Graph, ops: set[str]) -> int:
    """Return the number of elements of the parameters that these ops use, each parameter once."""
    used = {name for op in graph.ops if op.name in ops for name in op.params}
    return sum(math.prod(p.shape) for p in graph.params if p.name in used and p.kind == "param")


def _count(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
