"""A plan in words and numbers: a line for each stage, and a footer that says what the numbers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from autopart.ir.printable import printable, shortened
from autopart.ir.program import BUCKET_BYTES

if TYPE_CHECKING:  # a plan explains itself with this module
    from autopart.ir.plan import Estimate, Plan, Stage

COST_DESCRIPTIONS = {
    "analytic": "op costs are analytic: FLOPs and bytes against rates assumed to be reached",
    "measured": "op costs were measured on the device",
}
WORDS = ("stage", "ranks", "modules")
"""Columns that hold words; the others hold numbers."""


def explain(plan: Plan) -> str:
    """What a plan decides and what it would take, as plain text; `Plan.explain` says what the columns mean."""
    grid = stage_grid([stage_row(plan, s) for s in range(len(plan.stages))], total_row(plan))
    return "\n".join([*table_lines(grid, word_columns(grid[0])), *footer(plan)]) + "\n"


def stage_grid(rows: list[dict[str, str]], total: dict[str, str]) -> list[list[str]]:
    """The cells of the stage table, the header first.  rows: of the stages, by column.  total: shown below several."""
    header = list(rows[0])
    grid = [header, *([row[name] for name in header] for row in rows)]
    if len(rows) > 1:
        grid.append([total.get(name, "") for name in header])
    return grid


def table_lines(grid: Sequence[Sequence[str]], words: Container[int]) -> list[str]:
    """Lines of a table whose first row is the header; words: numbers of the columns that do not hold numbers.

    Every table of ours is drawn here.
    """
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


def word_columns(header: Sequence[str]) -> list[int]:
    """The columns of the table of stages that hold words."""
    return [column for column, name in enumerate(header) if name in WORDS]


def stage_row(plan: Plan, s: int) -> dict[str, str]:
    """What is said of one stage, by column."""
    stage = plan.stages[s]
    row = {"stage": str(s), "ranks": _spans(stage.ranks) + _divided(stage), "ops": str(len(stage.ops))}
    if any(other.recompute for other in plan.stages):
        row["recomputed"] = str(sum(map(len, stage.recompute)))
    if plan.estimates:
        row |= _numbers(plan.estimates[s])
    return row


def _divided(stage: Stage) -> str:
    """What is said of the replicas of a stage, other than that they have equal shares."""
    divided = stage.division
    if divided.in_turn:
        return " in turn"
    if max(divided.shares) == 1:
        return ""
    shares = ":".join(map(str, divided.shares))
    return f" shares {shortened(shares, 40)}"


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


def total_row(plan: Plan) -> dict[str, str]:
    """What can be added up over the stages, by column; work is that of all devices."""
    total = {"stage": "all"}
    if plan.estimates:
        mosts = [stage.division.most for stage in plan.stages]
        flops = sum(e.flops * whole // mine for e, (mine, whole) in zip(plan.estimates, mosts, strict=True))
        total["GFLOP"] = f"{flops / 1e9:.2f}"
        total["fwd ms"] = _ms(sum(e.fwd_ns for e in plan.estimates))
        total["bwd ms"] = _ms(sum(e.bwd_ns for e in plan.estimates))
    return total


def footer(plan: Plan) -> list[str]:
    """The lines below the table: the decision as a whole, its step, its bound, what else was considered, notes."""
    lines = [_summary(plan)]
    if plan.step_ns:
        lines.append(f"simulated, not measured: step {_ms(plan.step_ns)} ms, bubble {plan.bubble * 100:.1f} %")
    if plan.optimality is not None:
        bound = plan.optimality
        proof = "proved best" if bound.proved else f"at most {bound.gap:.1%} of it could be saved"
        lines.append(f"{proof}: no plan between the planner's blocks takes less than {_ms(bound.lower_bound)} ms")
    if plan.estimates:
        lines.append("memory in MiB; GFLOP, ms, in and out for one micro-batch")
        costs = plan.provenance.costs
        lines.append(COST_DESCRIPTIONS.get(costs, f"op costs: {costs}"))
    for other in plan.alternatives:
        time = f"{_ms(other.step_ns)} ms, " if other.step_ns else ""
        lines.append(f"alternative, {other.name}: {time}{other.why}")
    lines += [f"note: {note}" for note in plan.notes]
    return [printable(line) for line in lines]


def _summary(plan: Plan) -> str:
    used = sum(len(stage.ranks) for stage in plan.stages)
    parts = [
        f"schedule {plan.schedule}",
        f"{_many(len(plan.micro_rows), 'micro-batch', 'es')} of {_rows(plan.micro_rows)}",
        f"{_many(len(plan.stages), 'stage')} on {_many(plan.world, 'rank')}",
    ]
    if lengths := plan.decision.token_slices:
        parts.append(f"{len(lengths)} slices of {listed_runs(lengths)} tokens")
    if plan.decision.copies > 1 and len(plan.stages) > 1:
        parts.append(f"{plan.decision.copies} copies of the pipeline")
    if plan.decision.zero:
        parts.append("optimizer state shared by replicas")
    if plan.decision.bucket_bytes != BUCKET_BYTES:
        parts.append(f"gradients summed in buckets of {plan.decision.bucket_bytes / 2**20:g} MiB")
    if plan.world > used:
        parts.append(f"{plan.world - used} idle")
    return ", ".join(parts)


def _many(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{plural if count > 1 else ''}"


def listed_runs(lengths: tuple[int, ...]) -> str:
    """Equal neighbours counted: "128x2 64" is 128, 128, 64."""
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    return " ".join(f"{length}x{times}" if times > 1 else f"{length}" for length, times in runs)


def _rows(micro_rows: tuple[int, ...]) -> str:
    sizes = sorted(Counter(micro_rows).items(), reverse=True)
    if len(sizes) == 1:
        return _many(sizes[0][0], "row")
    return " and ".join(f"{rows} ({times}x)" for rows, times in sizes) + " rows"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"


def _mib(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    if mib >= 1000:
        return f"{mib:.0f}"
    return f"{mib:.1f}" if mib >= 1 or not size_bytes else f"{mib:.3f}"
