"""What runs a kind of batch that was not planned for: along the stages of the training plan."""

from __future__ import annotations

from dataclasses import replace

from autopart.capture.batch.batch import Batch
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Stage
from autopart.ir.size import Size
from autopart.passes.program.projection import check_gradients_stay, project_plan
from autopart.session.context import Mode, RankContext
from autopart.session.executor import Executor
from autopart.session.step.data import micro_rows


def largest_part(batch: Batch, mode: Mode, decision: Decision, shards: tuple[int, ...] = ()) -> Size:
    """The largest part of this batch that is run at once.  decision: of the training plan."""
    return Size(max(micro_rows(batch, shards, decision)) if mode is Mode.TRAIN else batch.rows or 1)


def new_executor(
    mode: Mode, context: RankContext, batch: Batch, shards: tuple[int, ...], planned: Graph, decision: Decision
) -> Executor:
    """What runs batches like this one; a changed model may run another program than the one that was planned.

    planned, decision: the graph and the decision of the training plan.  Local; raises RefusedError.
    """
    captured = context.captures(batch, largest_part(batch, mode, decision, shards), mode.value)
    stages = _stages_of(captured.graph, planned, decision, mode)
    if mode is Mode.TRAIN:
        check_gradients_stay(captured.graph, stages, planned, decision)
        return Executor(mode, context, captured, replace(decision, stages=stages))
    # A batch is evaluated whole, which is exact for any model: by first replicas.  A schedule of a user may have no
    # order for a single micro-batch.
    first = tuple(replace(stage, ranks=stage.ranks[:1], shares=(), policy="split") for stage in stages)
    whole = replace(decision, stages=first, token_slices=(), micro_rows=(1,), schedule="gpipe")
    return Executor(mode, context, captured, whole)


def _stages_of(graph: Graph, planned: Graph, decision: Decision, mode: Mode) -> tuple[Stage, ...]:
    """The plan's stages for a program that it was not made for; its own where only gradients flow differently."""
    same = [(op.name, op.target) for op in graph.ops] == [(op.name, op.target) for op in planned.ops]
    return decision.stages if same and mode is Mode.TRAIN else project_plan(graph, planned, decision)
