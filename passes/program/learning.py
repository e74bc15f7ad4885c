"""Which stages learn: those without anything that learns, on them or before them, are forward only.

With `requires_grad_(False)` on the first modules of a model, their ops have no backward.  A stage of such ops alone has
none either: it keeps nothing for a backward, gets no gradients, sums none and has no optimizer step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopart.ir.decision import Decision, Stage
from autopart.ir.graph import Graph
from autopart.passes.program.schedules import find


def with_forward_only(decision: Decision, learning: Collection[str]) -> Decision:
    """Mark the stages that are forward only, and no others; they recompute nothing.

    learning: the ops that have a backward (`Graph.learning_ops`); where there are none, as in evaluation, no stage is
    marked.  Under asynchronous schedules none is either: the rhythm of their updates has a backward on every stage,
    which does nothing there.  O(ops).
    """
    may_be = bool(learning) and find(decision.schedule).synchronous

    def marked(stage: Stage) -> Stage:
        forward_only = may_be and not any(name in learning for name in stage.ops)
        return replace(stage, forward_only=forward_only, recompute=() if forward_only else stage.recompute)

    return replace(decision, stages=tuple([marked(stage) for stage in decision.stages]))


def unsummed_stages(decision: Decision, graph: Graph) -> tuple[int, ...]:
    """Return the stages whose replicas have nothing to sum: without trainable parameters, and without buffers that
    change.  O(uses)."""
    trained = {param.name for param in graph.params if param.trainable}
    ops, changing = graph.op_map(), {value for _, value in graph.updates}

    def sums(stage: Stage) -> bool:
        own = [ops[name] for name in stage.ops]
        return any(not (trained.isdisjoint(op.params) and changing.isdisjoint(op.writes)) for op in own)

    return tuple(s for s, stage in enumerate(decision.stages) if not sums(stage))
