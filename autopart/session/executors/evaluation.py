"""How a batch is evaluated: in micro-batches that overlap on the stages where that is exact, else whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.ir.errors import CaptureError, RefusedError, UsageError
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.passes.program.projection import project_plan
from autopart.passes.program.routing import divided_values, route
from autopart.passes.program.verify import forward_program
from autopart.planning.derive.reduction import BatchRule, coupling_ops, family_of_batch, loss_reduction, row_layouts
from autopart.session.step.parts import micro_cut


def evaluated_rows(mode: str, batch: Batch, decision: Decision) -> tuple[int, ...]:
    """Return the rows of the micro-batches in which a batch may be evaluated, one if it cannot gain from several.

    decision: of the training plan, whose number of micro-batches counts.
    """
    ranks = {rank for stage in decision.stages for rank in stage.ranks}
    if mode != "loss" or len(ranks) == 1 or batch.rows is None:
        return (batch.rows or 1,)
    return micro_cut(batch.rows, decision.micro_rows)


def evaluation_decision(graph: Graph, planned: Graph, decision: Decision, *, cut: bool) -> Decision:
    """Return how batches are evaluated.  cut: whether in as many micro-batches as in training; else each stays whole.

    graph: in eval mode.  planned, decision: the graph and the decision of the training plan.  A batch that stays whole
    runs on first replicas, which is exact for any model.  One that is cut is shared by all replicas, but of the first
    stage, since only its first rank is given the batch.  A user's schedule may have no order for forwards alone.
    """
    stages = project_plan(graph, planned, decision)
    single = tuple(replace(s, ranks=s.ranks[: s.shards], shares=(), policy="split") for s in stages)
    if cut:
        return replace(decision, stages=(single[0], *stages[1:]), token_slices=(), schedule="gpipe", order=())
    return replace(decision, stages=single, token_slices=(), schedule="gpipe", order=(), micro_rows=(1,))


def evaluation_program(decision: Decision, graph: Graph) -> Program:
    """Return the program of an evaluation: forwards alone.  decision: of the evaluation.

    It is made with each stage on a rank of its own, so that the schedule need not know which stages share a rank.
    """
    apart = tuple(replace(stage, ranks=(number,), shards=1) for number, stage in enumerate(decision.stages))
    program = forward_program(route(replace(decision, stages=apart, world=len(apart)), graph))
    ranks = tuple(stage.ranks for stage in decision.stages)
    divisions = tuple(stage.division for stage in decision.stages)
    return replace(program, world=decision.world, stage_ranks=ranks, divisions=divisions)


def evaluation_rule(
    captures: CaptureCache, batch: Batch, planned: Graph, decision: Decision, stated: str
) -> BatchRule | None:
    """Return how the losses of the micro-batches of `evaluated_rows` combine in eval mode, None if a batch stays whole:
    nothing proves that they give the same loss, or the model draws random numbers or changes buffers.

    planned, decision: of the training plan.  stated: what the user states about the loss.
    """
    rows = evaluated_rows("loss", batch, decision)
    try:
        graph = captures(batch, Size(max(rows)), "loss").graph
        if coupling_ops(graph) or any(op.random for op in graph.ops):
            return None
        family = family_of_batch(partial(captures, mode="loss"), batch, rows)
        reduction = loss_reduction(family, (rows,), stated)
        evaluated = evaluation_decision(graph, planned, decision, cut=True)
        return BatchRule(reduction, row_layouts(family, reduction, *divided_values(evaluated, graph)))
    except (CaptureError, RefusedError, UsageError):
        return None
