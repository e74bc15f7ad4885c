"""The stage table of a plan: drawn as text, with a footer that explains the numbers, and as data for --json."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict

from autopart.ir.decision import Decision, Stage, listed_runs
from autopart.ir.errors import printable, shortened
from autopart.ir.graph import Graph, many, module_range, stage_modules
from autopart.ir.plan import Estimate, Outlook, Plan
from autopart.ir.program import BUCKET_BYTES

COST_DESCRIPTIONS = {
    "analytic": "op costs are analytic: FLOPs and bytes against rates assumed to be reached",
    "measured": "op costs were measured on the device",
    "compiled": "op costs were measured on the device in compiled code",
}
WORDS = ("stage", "ranks", "modules", "learns", "backward")
"""Columns of words; the others are numbers."""
DISPENSABLE = ("out", "in", "work", "GFLOP", "end ms", "params", "ops", "weights", "grad+opt", "act x live", "modules")
"""Columns that a table that is too wide leaves out, in this order."""
WIDTH = 100
"""Characters of a line if the width of the terminal is unknown."""


def terminal_width() -> int:
    """Return the characters of a line of the terminal; `WIDTH` where there is none."""
    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def stage_table(plan: Plan, graph: Graph | None = None, *, width: int | None = None, with_modules: bool = True) -> str:
    """Return the stages of a plan as plain text; `Plan.explain` says what the columns mean.

    graph: the captured graph of the plan; adds parameter counts, and modules to a plan without.  width: characters of a
    line, by default `terminal_width`; if lines would be wider, stages become columns.
    """
    modules = modules_of(plan, graph) if with_modules else ()
    rows = [_stage_row(plan, s, modules, graph) for s in range(len(plan.stages))]
    total = {"stage": "all"}
    if plan.estimates:
        mosts = [stage.division.most for stage in plan.stages]
        flops = sum(e.flops * whole // mine for e, (mine, whole) in zip(plan.estimates, mosts, strict=True))
        flops *= plan.decision.shards
        total["GFLOP"] = f"{flops / 1e9:.2f}"  # of all devices
        total["fwd ms"] = _ms(sum(e.fwd_ns for e in plan.estimates))
        total["bwd ms"] = _ms(sum(e.bwd_ns for e in plan.estimates))
    if graph is not None:
        total |= {"ops": str(len(graph.ops)), "params": _count(parameter_count(graph, {op.name for op in graph.ops}))}
    header = list(rows[0])
    grid = [header, *([row[name] for name in header] for row in rows)]
    if len(rows) > 1:
        grid.append([total.get(name, "") for name in header])
    lines = _fitting_lines(grid, width or terminal_width())
    return "\n".join([*lines, *_footer(plan.decision, plan.outlook, plan.provenance.costs)]) + "\n"


def modules_of(plan: Plan, graph: Graph | None) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each stage: of the graph where it is known, else those that the plan names."""
    if graph is not None:
        return stage_modules([stage.ops for stage in plan.stages], graph)
    return tuple(stage.modules for stage in plan.stages)


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
        "tensor_parallel": plan.decision.shards,
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
    facts["whole_backward"] = stage.whole_backward
    if plan.estimates:
        facts |= asdict(plan.estimates[s])
    return facts


# ---- text ----------------------------------------------------------------------------------------------------------


def table_lines(grid: Sequence[Sequence[str]], words: Container[int]) -> list[str]:
    """Draw a table whose first row is the header.  words: indices of the columns of words, aligned to the left."""
    grid = [[printable(cell) for cell in row] for row in grid]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = []
    for row in grid:
        cells = [
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(" " + "  ".join(cells).rstrip())
    rule = " " + "─" * (sum(widths) + 2 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:]]


def _fitting_lines(grid: list[list[str]], width: int) -> list[str]:
    """Return the lines of the stage table, if possible with at most `width` characters each.

    Each stage is a line; if lines are too wide, each stage is a column; if these are too wide as well, each stage is a
    line and columns of `DISPENSABLE` are left out.
    """
    lines = table_lines(grid, _word_columns(grid[0]))
    if max(map(len, lines)) <= width:
        return lines
    turned = table_lines([list(column) for column in zip(*grid, strict=True)], [0])
    if max(map(len, turned)) <= width:
        return turned
    left: list[str] = []
    for name in (name for name in DISPENSABLE if name in grid[0]):
        at = grid[0].index(name)
        grid, left = [[*row[:at], *row[at + 1 :]] for row in grid], [*left, name]
        lines = table_lines(grid, _word_columns(grid[0]))
        if max(map(len, lines)) <= width:
            break
    return [*lines, f"left out, for lines of {width} characters: {', '.join(left)}"] if left else lines


def _word_columns(header: Sequence[str]) -> list[int]:
    """Return the indices of the columns of words."""
    return [column for column, name in enumerate(header) if name in WORDS]


def _stage_row(plan: Plan, s: int, modules: Sequence[Sequence[str]], graph: Graph | None) -> dict[str, str]:
    """Return the cells of one stage, by column."""
    stage = plan.stages[s]
    row = {"stage": str(s), "ranks": rank_spans(stage.ranks) + divided(stage)}
    if any(modules):
        row["modules"] = module_range(modules[s])
    row["ops"] = str(len(stage.ops))
    if graph is not None:
        row["params"] = _count(parameter_count(graph, set(stage.ops)))
    if any(other.recompute for other in plan.stages):
        row["recomputed"] = str(sum(map(len, stage.recompute)))
    if any(other.forward_only for other in plan.stages):
        row["learns"] = "no" if stage.forward_only else "yes"
    if any(other.whole_backward for other in plan.stages):
        row["backward"] = backward_of(stage)
    if plan.estimates:
        row |= _numbers(plan.estimates[s])
    return row


def backward_of(stage: Stage) -> str:
    """Say whether the backward of a stage is split, where the schedule splits some."""
    return "none" if stage.forward_only else "whole" if stage.whole_backward else "split"


def divided(stage: Stage) -> str:
    """Describe which ranks compute together, or how replicas divide micro-batches, if not in equal shares."""
    division = stage.division
    if stage.shards > 1 and stage.replicas > 1:
        return f" in groups of {stage.shards}"
    if division.in_turn:
        return " in turn"
    if max(division.shares) == 1:
        return ""
    shares = ":".join(map(str, division.shares))
    return f" shares {shortened(shares, 40)}"


def rank_spans(ranks: tuple[int, ...]) -> str:
    """Write (0, 1, 2, 5) as "0-2,5"; long lists are cut."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(words if len(words) <= 6 else [*words[:5], "...", words[-1]])


def _numbers(e: Estimate) -> dict[str, str]:
    return {
        "GFLOP": f"{e.flops / 1e9:.2f}",
        "fwd ms": _ms(e.fwd_ns),
        "bwd ms": _ms(e.bwd_ns),
        "weights": _mib(e.param_bytes),
        "grad+opt": _mib(e.state_bytes),
        "act x live": f"{_mib(e.activation_bytes)} x {e.live}",
        "work": _mib(e.workspace_bytes + e.buffer_bytes),
        "peak": _mib(e.peak_bytes),
        "in": _mib(e.in_bytes),
        "out": _mib(e.out_bytes),
        "end ms": _ms(e.reduce_ns + e.optimizer_ns),
    }


def _footer(decision: Decision, outlook: Outlook, costs: str) -> list[str]:
    """Return the lines below the table: the whole decision, its step and bound, alternatives, notes."""
    lines = [summary(decision)]
    if any(stage.forward_only for stage in decision.stages):
        lines.append("stages on which nothing learns are forward only: no backward, no gradients, no optimizer")
    if any(stage.whole_backward for stage in decision.stages):
        lines.append("stages without room for what W keeps run whole backwards inside of the schedule's order")
    if outlook.step_ns:
        lines.append(f"simulated, not measured: step {_ms(outlook.step_ns)} ms, bubble {outlook.bubble * 100:.1f} %")
    if outlook.optimality is not None:
        bound = outlook.optimality
        proof = "proved best" if bound.proved else f"at most {bound.gap:.1%} of it could be saved"
        lines.append(f"{proof}: lower bound for this model on this cluster {_ms(bound.lower_bound)} ms")
    if outlook.estimates:
        lines.append("memory in MiB; GFLOP, ms, in and out for one micro-batch")
        lines.append(COST_DESCRIPTIONS.get(costs, f"op costs: {costs}"))
    for other in outlook.alternatives:
        time = f"{_ms(other.step_ns)} ms, " if other.step_ns else ""
        lines.append(f"alternative, {other.name}: {time}{other.why}")
    lines += [f"note: {note}" for note in outlook.notes]
    return [printable(line) for line in lines]


def summary(decision: Decision) -> str:
    """Return what is decided besides stages, in one line."""
    used = sum(len(stage.ranks) for stage in decision.stages)
    parts = [
        f"schedule {decision.schedule}",
        f"{many(len(decision.micro_rows), 'micro-batch')} of {_rows(decision.micro_rows)}",
        f"{many(len(decision.stages), 'stage')} on {many(decision.world, 'rank')}",
    ]
    if lengths := decision.token_slices:
        parts.append(f"{len(lengths)} slices of {listed_runs(lengths)} tokens")
    if decision.shards > 1:
        parts.append(f"each divided among {decision.shards} ranks (tensor parallelism)")
    if decision.copies > 1 and len(decision.stages) > 1:
        parts.append(f"{decision.copies} copies of the pipeline")
    if decision.zero:
        parts.append("optimizer state shared by replicas")
    if decision.bucket_bytes != BUCKET_BYTES:
        parts.append(f"gradients summed in buckets of {decision.bucket_bytes / 2**20:g} MiB")
    if decision.world > used:
        parts.append(f"{decision.world - used} idle")
    return ", ".join(parts)


def _rows(micro_rows: tuple[int, ...]) -> str:
    sizes = sorted(Counter(micro_rows).items(), reverse=True)
    if len(sizes) == 1:
        return many(sizes[0][0], "row")
    return " and ".join(f"{rows} ({times}x)" for rows, times in sizes) + " rows"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _mib(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    if mib >= 1000:
        return f"{mib:.0f}"
    return f"{mib:.1f}" if mib >= 1 or not size_bytes else f"{mib:.3f}"
