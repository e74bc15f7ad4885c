"""The limits of asynchronous schedules, which update weights while micro-batches are in flight."""

from __future__ import annotations

from autopart.ir.decision import Decision
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.passes.program.routing import tied
from autopart.session.code.stage_code import split_stages


def require_updatable(decision: Decision, graph: Graph, scale: float) -> None:
    """Raise RefusedError if gradients are not complete after the backward of one micro-batch on one rank.

    scale: of the loss.
    """
    problems = {
        "replicas": any(len(stage.ranks) > 1 for stage in decision.stages),
        "token slices": bool(decision.token_slices),
        "parameters that several stages share": bool(tied(decision, graph)),
        "half-precision parameters": any(p.trainable and p.dtype in ("float16", "bfloat16") for p in graph.params),
        "a loss scale": scale != 1,
        "a split backward": bool(split_stages(decision)),
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise RefusedError(
            f"schedule {decision.schedule} cannot train with {' and '.join(found)}",
            why="it updates the weights of a stage after the backward of each micro-batch",
            fix="use a synchronous schedule, or a plan with one rank for each stage and fp32 parameters of its own",
        )
