"""The tables of the page: what is decided, what it takes, what was measured, and what lost.

Numbers are written as people read them; the exact ones stand beside them in the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopart.ir.errors import printable
from autopart.ir.graph import module_range
from autopart.ir.plan import Alternative, Plan
from autopart.ir.timeline import Timeline, stage_sums
from autopart.report.plan_table import COST_DESCRIPTIONS, rank_spans


class Cell(NamedTuple):
    """A cell of a table.  text: shown.  exact: the number that it stands for, or None for words.  share: length of its
    bar, 0 to 1, or None."""

    text: str
    exact: float | None = None
    share: float | None = None


def words(text: object) -> Cell:
    """Return a cell of words."""
    return Cell(printable(str(text)))


def count(number: float) -> Cell:
    """Return a cell of a whole number."""
    return Cell(f"{number:,}", number)


def duration(ns: float) -> Cell:
    """Return a cell of nanoseconds."""
    return Cell(duration_text(ns), ns)


def duration_text(ns: float) -> str:
    """Write nanoseconds in the largest unit in which they are at least 1."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(ns) >= size:
            return f"{ns / size:.{2 if abs(ns) < 100 * size else 1}f} {unit}"
    return f"{ns:.0f} ns"


def memory(size_bytes: float) -> Cell:
    """Return a cell of bytes."""
    return Cell(memory_text(size_bytes), size_bytes)


def memory_text(size_bytes: float) -> str:
    """Write bytes in the largest binary unit in which they are at least 1."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.{2 if size_bytes < 100 * size else 1}f} {unit}"
    return f"{size_bytes:.0f} B"


def part(share: float) -> Cell:
    """Return a cell of a share between 0 and 1."""
    return Cell(f"{share:.1%}", share, max(0.0, min(1.0, share)))


def change(now: float, before: float) -> Cell:
    """Return a cell that says by how much a number differs from one before."""
    return Cell(f"{now / before - 1:+.1%}", now / before - 1) if before else words("")


@dataclass(frozen=True, slots=True)
class Table:
    """A table.  name: of the table in the page.  rows: cells by column, alike in all rows.  more: of each row, lists by
    name that can be unfolded."""

    name: str
    rows: Sequence[Mapping[str, Cell]]
    more: Sequence[Mapping[str, Sequence[str]]] = ()

    @property
    def columns(self) -> dict[str, bool]:
        """Whether each column has numbers."""
        return {head: any(row[head].exact is not None for row in self.rows) for head in self.rows[0]}


def tiles(plan: Plan, measured: Timeline | None) -> list[tuple[str, Cell, str]]:
    """Return the most important numbers, each as (what it is, number, remark)."""
    decision, outlook = plan.decision, plan.outlook
    found = []
    if plan.step_ns:
        bound = outlook.optimality
        remark = "one optimizer step" if bound is None else "proved best"
        if bound is not None and not bound.proved:
            remark = f"lower bound {duration_text(bound.lower_bound)}"
        found.append(("simulated step", duration(plan.step_ns), remark))
    if measured is not None:
        ns, said = measured.step_ns, plan.step_without_optimizer_ns
        remark = f"{change(ns, said).text} against the simulation" if said else "one step"
        found.append(("measured step", duration(ns), remark))
    if plan.step_ns:
        idle = f"measured {measured.bubble:.1%}" if measured else "idle share of the devices"
        found.append(("bubble", part(outlook.bubble)._replace(share=None), idle))
    used = len({rank for stage in plan.stages for rank in stage.ranks})
    found.append(("stages", count(len(plan.stages)), f"on {used:,} of {decision.world:,} ranks"))
    least, most = min(plan.micro_rows), max(plan.micro_rows)
    rows = f"{least} or {most} rows" if least < most else f"{most} row{'s' * (most > 1)}"
    found.append(("micro-batches", count(len(plan.micro_rows)), f"of {rows}, schedule {plan.schedule}"))
    if plan.estimates:
        s = max(range(len(plan.stages)), key=lambda s: plan.estimates[s].peak_bytes)
        limit = outlook.limits[s] if outlook.limits else 0
        remark = f"stage {s}" + (f", of {memory_text(limit)}" if limit else "")
        found.append(("fullest device", memory(plan.estimates[s].peak_bytes), remark))
    return [(printable(name), cell, printable(remark)) for name, cell, remark in found]


def stages(plan: Plan, modules: Sequence[Sequence[str]], measured: Timeline | None) -> Table:
    """Return the table of stages: what runs where, and what that takes.  modules: of each stage."""
    known, times = plan.estimates, stage_times(measured) if measured is not None else {}
    rows, more = [], []
    for s, stage in enumerate(plan.stages):
        row = {"stage": count(s), "ranks": words(rank_spans(stage.ranks)), "modules": words(module_range(modules[s]))}
        row["ops"] = count(len(stage.ops))
        if known:
            row |= {"forward": duration(known[s].fwd_ns), "backward": duration(known[s].bwd_ns)}
            row["sums, optimizer"] = duration(known[s].reduce_ns + known[s].optimizer_ns)
        if times:
            forward, backward = times.get(s, (0, 0))
            row |= {"measured forward": duration(forward), "measured backward": duration(backward)}
        if known and len(known) > 1:
            row |= {"in": memory(known[s].in_bytes), "out": memory(known[s].out_bytes)}
        rows.append(row)
        recomputed = [", ".join(group) for group in stage.recompute]
        lists = {"modules": modules[s], "ops": stage.ops, "recomputed groups of ops": recomputed}
        more.append({name: [printable(text) for text in found] for name, found in lists.items() if found})
    return Table("stages", rows, more)


def memories(plan: Plan, peaks: Mapping[int, int]) -> Table | None:
    """Return what a device of each stage holds.  peaks: measured bytes by rank; may be empty."""
    if not plan.estimates:
        return None
    limits, splits = plan.outlook.limits, any(e.weight_bytes for e in plan.estimates)
    rows = []
    for s, e in enumerate(plan.estimates):
        row = {"stage": count(s), "weights": memory(e.param_bytes), "gradients, optimizer": memory(e.state_bytes)}
        row |= {"activations": memory(e.activation_bytes), "in flight": count(e.live)}
        if splits:
            row["kept from I to W"] = memory(e.weight_bytes)
        row |= {"workspace, messages": memory(e.workspace_bytes + e.buffer_bytes), "peak": memory(e.peak_bytes)}
        if limits:
            row["of the device"] = part(e.peak_bytes / limits[s]) if limits[s] else words("")
        if peaks:
            row["measured peak"] = memory(max([peaks.get(rank, 0) for rank in plan.stages[s].ranks]))
        rows.append(row)
    return Table("memory", rows)


def alternatives(plan: Plan) -> Table | None:
    """Return the plans that lost, and by how much."""
    if not plan.outlook.alternatives:
        return None
    slowest = max([plan.step_ns, *(other.step_ns for other in plan.outlook.alternatives)]) or 1
    rows: list[dict[str, Cell]] = []
    for other in (Alternative("this plan", plan.step_ns, ""), *plan.outlook.alternatives):
        ns, this = other.step_ns, not rows
        step = duration(ns)._replace(share=ns / slowest) if ns or this else words("-")
        against = change(ns, plan.step_ns) if ns and not this else words("")
        row = {"plan": words(other.name), "simulated step": step, "against this plan": against}
        rows.append(row | {"why it was not taken": words(other.why)})
    return Table("alternatives", rows)


def compared(plan: Plan, measured: Timeline | None) -> Table | None:
    """Return predicted and measured times."""
    if measured is None or not plan.step_ns:
        return None
    pairs = [("step without the optimizer", plan.step_without_optimizer_ns, measured.step_ns)]
    if plan.estimates:
        for s, (forward, backward) in sorted(stage_times(measured).items()):
            pairs.append((f"forward of stage {s}", plan.estimates[s].fwd_ns, forward))
            pairs.append((f"backward of stage {s}", plan.estimates[s].bwd_ns, backward))
    rows = [[words(what), duration(said), duration(took), change(took, said)] for what, said, took in pairs]
    rows.append([words("bubble"), part(plan.outlook.bubble), part(measured.bubble), words("")])
    heads = ("", "predicted", "measured", "difference")
    return Table("compared", [dict(zip(heads, row, strict=True)) for row in rows])


def provenance(plan: Plan) -> list[tuple[str, str]]:
    """Return what the plan was made for, and remarks."""
    made, decision = plan.provenance, plan.decision
    found = [
        ("plan", plan.digest()),
        ("graph", made.graph_digest),
        ("torch", made.torch_version),
        ("precision", made.precision),
        ("costs", COST_DESCRIPTIONS.get(made.costs, made.costs)),
        ("optimizer state", "shared by the replicas of a stage" if decision.zero else "whole on every replica"),
    ]
    if decision.token_slices:
        found.append(("slices of tokens", " ".join(map(str, decision.token_slices))))
    return [(name, printable(text)) for name, text in found]


def stage_times(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Return the mean nanoseconds of the forward and the backward of a micro-batch, by stage."""
    return {
        s: (forward // count, backward // count) for s, (forward, backward, count) in stage_sums(timeline.spans).items()
    }
