"""From a model and a batch to a plan, on one process: capture, loss rule, costs, passes.  Opens no process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from .capture import Captured, Capturer
from .capture.batch import Batch, split_rows
from .capture.probe import prove_rows
from .capture.rows import mark_rows
from .files import load_plan, match_plan
from .ir.cluster import Cluster
from .ir.errors import UsageError
from .ir.graph import Graph, Weight
from .ir.plan import Plan
from .measure import measure_costs
from .options import Options
from .passes.loss import UnprovenRows, weigh
from .passes.pipeline import build
from .passes.rules import analytic_costs

WHOLE = Weight("any")


@dataclass(frozen=True)
class Planned:
    """A plan, the capture it was made from, and how the losses of micro-batches combine."""

    plan: Plan
    captured: Captured
    weight: Weight


def make_plan(capturer: Capturer, batch: Batch, cluster: Cluster, options: Options) -> Planned:
    """Plan a model for batches like `batch` on `cluster`.

    Raises CaptureError, RefusedError (what cannot be exact), UsageError, PlanError.
    """
    given = read_plan(options)
    micro_rows = given.micro_rows if given else choose_rows(batch, cluster, options)
    captured = capturer(batch, max(micro_rows))
    if given:
        match_plan(given, captured.graph, torch_version=torch.__version__, world=cluster.world)
    weight = loss_weight(capturer, batch, captured, micro_rows, options)
    if given:
        return Planned(given, captured, weight)
    graph, source, notes = _costs(captured, cluster, options)
    plan = build(
        graph,
        cluster,
        stages=options.stages,
        micro_rows=micro_rows,
        schedule=options.schedule,
        cuts=options.cuts,
        torch_version=torch.__version__,
        costs=source,
    )
    return Planned(replace(plan, notes=plan.notes + notes), captured, weight)


def read_plan(options: Options) -> Plan | None:
    """The plan that the user gave, loaded and validated, or None."""
    if isinstance(options.plan, (str, os.PathLike)):
        return load_plan(options.plan)
    if options.plan is not None and not isinstance(options.plan, Plan):
        raise UsageError(f"plan is a {type(options.plan).__name__}", fix="pass an autopart.Plan or the path of a file")
    return options.plan


def choose_rows(batch: Batch, cluster: Cluster, options: Options) -> tuple[int, ...]:
    """Rows of each micro-batch: as the user says, else four micro-batches per stage where the batch allows (the
    bubble is then at most a fifth, GPipe section 2.3)."""
    if batch.rows is None:
        if options.micro_batches not in (None, 1):
            raise UsageError(
                f"micro_batches is {options.micro_batches} and the batch has no rows",
                why="none of its tensors has an axis",
                fix="use micro_batches=1",
            )
        return (1,)
    stages = options.stages or cluster.world
    default = min(batch.rows, 4 * stages) if stages > 1 else 1
    return split_rows(batch.rows, options.micro_batches or default)


def loss_weight(
    capturer: Capturer, batch: Batch, captured: Captured, micro_rows: tuple[int, ...], options: Options
) -> Weight:
    """How the losses of micro-batches combine.  One needs no rule; more need one that is proven exact.

    Raises CoupledLossError when the whole loss is no combination of theirs.
    """
    if len(micro_rows) == 1:
        return WHOLE
    rows = max(micro_rows)
    other = capturer(batch, _second(rows, micro_rows))
    graph = mark_rows(captured.graph, other.graph)
    stated = None if options.loss_reduction == "auto" else options.loss_reduction
    try:
        return weigh(graph, other.graph, stated=stated)
    except UnprovenRows as unproven:
        proven = _prove(captured, other, unproven.names, batch)
    try:
        return weigh(graph, other.graph, stated=stated, proven=proven)
    except UnprovenRows as unproven:
        raise unproven.refusal from None


def _second(rows: int, micro_rows: tuple[int, ...]) -> int:
    """Another number of rows to compare with: one that will be run anyway, if there is one."""
    return min(micro_rows) if min(micro_rows) != rows else rows + 1


def _prove(captured: Captured, other: Captured, names: frozenset[str], batch: Batch) -> frozenset[str]:
    if any(tensor.is_meta for tensor in captured.tensors.values()):
        return names  # planning only: compile checks again, with weights
    small, large = sorted((captured, other), key=lambda c: c.graph.rows)
    return prove_rows(small, large, names, batch)


def _costs(captured: Captured, cluster: Cluster, options: Options) -> tuple[Graph, str, tuple[str, ...]]:
    """The graph with costs, where they come from, and what to say about them."""
    meta = any(tensor.is_meta for tensor in captured.tensors.values())
    here = cluster.kind == "cpu" or torch.cuda.is_available()
    if options.costs == "analytic" or (options.costs == "auto" and (meta or not here)):
        return analytic_costs(captured.graph, cluster.devices[0]), "analytic", ()
    graph, notes = measure_costs(captured, cluster.devices[0])
    return graph, "measured", notes
