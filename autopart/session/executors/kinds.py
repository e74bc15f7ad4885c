"""What runs a kind of batch: an executor for its program, along the stages of the training plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.capture import Captured
from autopart.capture.batch.batch import Batch
from autopart.capture.derive.reduction import BatchRule
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.size import Size
from autopart.passes.program.projection import check_gradients_stay, project_plan
from autopart.session.executors.evaluation import evaluated_rows, evaluation_decision
from autopart.session.executors.executor import Executor, RankContext
from autopart.session.step.data import micro_rows


def largest_part(batch: Batch, mode: str, decision: Decision, shards: Sequence[int] = ()) -> Size:
    """Return the size of the largest part of this batch that is run at once.  decision: of the training plan."""
    return Size(max(micro_rows(batch, shards, decision) if mode == "step" else evaluated_rows(mode, batch, decision)))


def new_executor(
    mode: str,
    context: RankContext,
    batch: Batch,
    shards: Sequence[int],
    planned: Graph,
    decision: Decision,
    rule: BatchRule | None = None,
) -> Executor:
    """Return what runs batches like this one; a changed model may run another program than the one that was planned.

    planned, decision: the graph and the decision of the training plan.  rule: how batches are cut in evaluation, None
    to leave them whole.  Local; raises RefusedError.
    """
    if mode != "step":
        rows = evaluated_rows(mode, batch, decision) if rule is not None else (batch.rows or 1,)
        captured = context.captures(batch, Size(max(rows)), mode)
        evaluated = evaluation_decision(captured.graph, planned, decision, cut=rule is not None)
        return Executor(mode, context, captured, evaluated, rule)
    captured = context.captures(batch, largest_part(batch, mode, decision, shards), mode)
    own = projected(captured, planned, decision)
    check_gradients_stay(captured.graph, own.stages, planned, decision)
    return Executor(mode, context, captured, own)


def projected(captured: Captured, planned: Graph, decision: Decision) -> Decision:
    """Return the decision of the training plan for a program that differs from the planned one.  Raises PlanError."""
    same = [(op.name, op.target) for op in captured.graph.ops] == [(op.name, op.target) for op in planned.ops]
    return decision if same else replace(decision, stages=project_plan(captured.graph, planned, decision))
