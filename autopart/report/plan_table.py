"""A plan as a table, one line a stage: what runs where, how long it should take and what it should need."""

from __future__ import annotations

import io
import math
from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table

from autopart.ir.capabilities import lacking
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Estimate, Plan

NATURAL_WIDTH = 400  # a line a stage, however long
WORDY = ("stage", "ranks", "modules")
COST_SOURCES = {
    "analytic": "op costs are analytic: FLOPs and bytes against peak rates",
    "measured": "op costs were measured on the device",
}


def stage_table(plan: Plan, graph: Graph | None = None, *, width: int = NATURAL_WIDTH) -> str:
    """The stages of a plan as plain text, with a footer that says what the numbers are.

    graph: the captured graph the plan is for; adds module paths and parameter counts.  Times, work and memory are of
    one device of the stage.  Memory is in MiB: weights; gradients and optimizer state; activations of one micro-batch
    times the micro-batches in flight; work: workspace and messages; the peak.  again: operations computed again in
    the backward.  end ms: sum of gradients over the replicas, and the optimizer.  in and out: MiB that the stage
    receives and sends per micro-batch in the forward.  width: characters of the terminal; where a line a stage does
    not fit, stages become columns.
    """
    rows = [_row(plan, s, graph) for s in range(len(plan.stages))]
    if len(rows) > 1:
        total = _total(plan, graph)
        rows.append({name: total.get(name, "") for name in rows[0]})
    grid = [list(rows[0]), *(list(row.values()) for row in rows)]
    lines = _drawn(grid, left=sum(name in WORDY for name in grid[0]))
    if max(map(len, lines)) > width:
        lines = _drawn([list(column) for column in zip(*grid, strict=True)], left=1)
    return "\n".join([*lines, *_footer(plan)]) + "\n"


def _drawn(grid: list[list[str]], left: int) -> list[str]:
    """Lines of a table whose first row is the header and whose first `left` columns hold words."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for c, name in enumerate(grid[0]):
        table.add_column(name, justify="left" if c < left else "right", no_wrap=True)
    for row in grid[1:]:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=100_000, color_system=None, highlight=False, emoji=False, markup=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def _row(plan: Plan, s: int, graph: Graph | None) -> dict[str, str]:
    stage = plan.stages[s]
    row = {"stage": str(s), "ranks": _spans(stage.ranks)}
    if graph is not None:
        row["modules"] = module_range(plan, s, graph)
    row["ops"] = str(len(stage.ops))
    if graph is not None:
        row["params"] = _count(_params(graph, set(stage.ops)))
    if any(other.recompute for other in plan.stages):
        row["again"] = str(sum(map(len, stage.recompute)))
    if plan.estimates:
        row |= _numbers(plan.estimates[s])
    return row


def _spans(ranks: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2,5", in the order given; long lists are cut."""
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


def _total(plan: Plan, graph: Graph | None) -> dict[str, str]:
    total = {"stage": "all"}
    if graph is not None:
        total |= {"ops": str(len(graph.ops)), "params": _count(_params(graph, {op.name for op in graph.ops}))}
    if plan.estimates:
        total["GFLOP"] = f"{_flops(plan) / 1e9:.2f}"
        total["fwd ms"] = _ms(sum(e.fwd_ns for e in plan.estimates))
        total["bwd ms"] = _ms(sum(e.bwd_ns for e in plan.estimates))
    return total


def _flops(plan: Plan) -> int:
    """Of all devices."""
    return sum(e.flops * len(stage.ranks) for e, stage in zip(plan.estimates, plan.stages, strict=True))


def _footer(plan: Plan) -> list[str]:
    used = sum(len(stage.ranks) for stage in plan.stages)
    idle = f", {plan.world - used} idle" if plan.world > used else ""
    micros, stages = _many(len(plan.micro_rows), "micro-batch", "es"), _many(len(plan.stages), "stage")
    copies = (
        f", {plan.decision.copies} copies of the pipeline" if plan.decision.copies > 1 and len(plan.stages) > 1 else ""
    )
    lines = [
        f"schedule {plan.schedule}, {micros} of {_rows(plan)}, {stages} on {_many(plan.world, 'rank')}{copies}{idle}"
    ]
    if plan.step_ns:
        lines.append(f"simulated, not measured: step {_ms(plan.step_ns)} ms, bubble {plan.bubble * 100:.1f} %")
    if plan.optimality is not None:
        bound = plan.optimality
        proof = "proved best" if bound.proved else f"at most {bound.gap:.1%} of it could be saved"
        lines.append(f"{proof}: no plan between the planner's blocks takes less than {_ms(bound.lower_bound)} ms")
    if plan.estimates:
        lines.append("memory in MiB; GFLOP, ms, in and out for one micro-batch")
        lines.append(COST_SOURCES.get(plan.provenance.costs, f"op costs: {plan.provenance.costs}"))
    for other in plan.alternatives:
        time = f"{_ms(other.step_ns)} ms, " if other.step_ns else ""
        lines.append(f"instead of this, {other.name}: {time}{other.why}")
    lines += [f"note: {note}" for note in plan.notes]
    if missing := lacking(plan):
        lines.append(f"for planning alone: the runtime does not have {' and '.join(missing)} yet")
    return lines


def _many(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count > 1 else ''}"


def _rows(plan: Plan) -> str:
    sizes = sorted(Counter(plan.micro_rows).items(), reverse=True)
    if len(sizes) == 1:
        return _many(sizes[0][0], "row")
    return " and ".join(f"{rows} ({times}x)" for rows, times in sizes) + " rows"


def module_range(plan: Plan, s: int, graph: Graph) -> str:
    """First and last module of a stage, as "transformer.h.0 … transformer.h.3".

    A path ends at its first number, so that a layer is one module.  Ops that stand in several stages do not count,
    unless the stage has no others.
    """
    copies = Counter(name for stage in plan.stages for name in stage.ops)
    mine = set(plan.stages[s].ops)
    ops = [op for op in graph.ops if op.name in mine]
    paths = list(dict.fromkeys(_layer(op) for op in [o for o in ops if copies[o.name] == 1] or ops if op.module))
    if len(paths) <= 2:
        return ", ".join(paths)
    return f"{paths[0]} … {paths[-1]}"


def _layer(op: Op) -> str:
    parts = op.module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return op.module


def _params(graph: Graph, ops: set[str]) -> int:
    used = {name for op in graph.ops if op.name in ops for name in op.params}
    return sum(math.prod(p.shape) for p in graph.params if p.name in used and p.kind == "param")


def _count(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _mib(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:.0f}" if mib >= 1000 else f"{mib:.1f}" if mib >= 1 or not size_bytes else f"{mib:.3f}"
