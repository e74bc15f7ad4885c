"""The tables of the page: what is decided, what it takes and what limits it, what was measured, and what lost.

Numbers are written as people read them; the exact ones stand beside them in the page."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from autopart.ir.errors import printable, shortened
from autopart.ir.graph import Graph, module_range
from autopart.ir.plan import Alternative, Plan
from autopart.ir.timeline import Timeline, stage_sums
from autopart.report.comparison import Answer
from autopart.report.critical_path import Link, what_limits
from autopart.report.plan_table import COST_DESCRIPTIONS, backward_of, divided, parameter_count, rank_spans

_PERCENT = re.compile(r"^[+-][\d.]+%,? ?")
"""What the reason of an alternative begins with, and a column of its own has."""


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


def tiles(plan: Plan, measured: Timeline | None, answer: Answer | None = None) -> list[tuple[str, Cell, str]]:
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
    if (rates := answer.delivered() if answer is not None else None) is not None:
        many = "tokens" if rates["tokens_per_s"] else "rows"
        rate = rates[f"{many}_per_s"]
        text = f"{rate / 1e6:.2f} M" if rate >= 1e6 else f"{rate:,.0f}"
        found.append((f"{many} a second", Cell(text, rate), "simulated"))
        mfu = part(rates["mfu"])._replace(share=None)
        known = all(device.name or device.rates for device in answer.cluster.devices) if answer is not None else False
        remark = "FLOPs of the model over " + (
            "the peak of all devices" if known else "assumed peaks: none was measured"
        )
        found.append(("MFU", mfu, remark))
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
        row = {"stage": count(s), "ranks": words(rank_spans(stage.ranks) + divided(stage))}
        row["modules"] = words(module_range(modules[s]))
        row["ops"] = count(len(stage.ops))
        if any(other.whole_backward for other in plan.stages):
            row["backwards"] = words(backward_of(stage))
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


def memories(plan: Plan, peaks: Mapping[int, int], *, of_process: bool = False) -> Table | None:
    """Return what a device of each stage holds.

    peaks: measured bytes by rank; may be empty.  of_process: whether they are of the whole process, with Python and
    libraries, which a plan does not charge.
    """
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
            row["measured, whole process" if of_process else "measured peak"] = memory(
                max([peaks.get(rank, 0) for rank in plan.stages[s].ranks])
            )
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
        why = _PERCENT.sub("", other.why).removeprefix("(").removesuffix(")")
        rows.append(row | {"why it was not taken": words(why or "slower" * (ns > plan.step_ns))})
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


def limits(path: Sequence[Link], step_ns: int) -> tuple[Table | None, str]:
    """Return what the longest chain of the simulated step does, and in words what limits the step."""
    if not path or not step_ns:
        return None, ""
    found = what_limits(path, step_ns)
    rows = [
        {"in the longest chain": words(what), "time": duration(ns), "of the step": part(ns / step_ns)}
        for what, ns in found.items()
    ]
    most = next(iter(found))
    said = f"the longest chain of spans, marked in the picture; {most}: {found[most] / step_ns:.0%}"
    return Table("limits", rows), said


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def drawn_here() -> dict[str, str]:
    """Return when, where and with what a page is drawn; nothing of it is in a plan file."""
    versions = [f"{name} {_version(name)}" for name in ("autopart", "torch")]
    return {
        "drawn": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on host {platform.node()}",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}", platform.platform(terse=True)]),
        "command": shortened(shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]]), 300),
    }


def asked(answer: Answer, options: Mapping[str, object]) -> dict[str, str]:
    """Return what a plan was asked for: its machines, its batch, its model and the options."""
    cluster, graph, plan = answer.cluster, answer.graph, answer.plan
    kinds = Counter((d.name or d.kind, d.kind, d.memory_bytes) for d in cluster.devices)
    found = {
        "cluster": ", ".join(
            f"{count} x {name}{f' ({kind})' if name != kind else ''} with {memory_text(size)}"
            for (name, kind, size), count in kinds.items()
        ),
        "links": ", ".join(
            f"{level.link.bytes_per_s / 1e9:.4g} GB/s among {level.size} devices" for level in cluster.levels
        ),
    }
    if plan is not None:
        tokens = f" x {answer.tokens:,} tokens" if answer.tokens else ""
        found["batch"] = f"{sum(plan.micro_rows):,} rows{tokens}"
    if graph is not None:
        found["parameters"] = _parameters(graph)
    if options:
        found["options"] = shortened(
            ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()), 500
        )
    return found


def _parameters(graph: Graph) -> str:
    count = parameter_count(graph, {op.name for op in graph.ops})
    frozen = len([param for param in graph.params if param.kind == "param" and not param.trainable])
    return f"{count:,}" + (f", {frozen} of {len(graph.params)} tensors frozen" if frozen else "")


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
    if decision.shards > 1:
        found.append(("tensor parallelism", f"{decision.shards} ranks divide the weights and the work of each replica"))
    if decision.token_slices:
        found.append(("slices of tokens", " ".join(map(str, decision.token_slices))))
    return [(name, printable(text)) for name, text in found]


def stage_times(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Return the mean nanoseconds of the forward and the backward of a micro-batch, by stage."""
    return {
        s: (forward // count, backward // count) for s, (forward, backward, count) in stage_sums(timeline.spans).items()
    }
