"""The program of one kind of batch: of a training step, or of an evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopart.ir.decision import Decision
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.ir.program import Program
from autopart.passes.program.routing import route, tied
from autopart.passes.program.verify import check_program, forward_program


def training_program(
    decision: Decision, graph: Graph, prologue: Collection[str] = (), statistics: tuple[int, ...] = ()
) -> Program:
    """Return the verified program of a training step.

    prologue: ops that every stage runs on whole sequences.  statistics: stages whose replicas share batch statistics.
    Raises ProgramError.
    """
    program = replace(route(decision, graph, prologue), statistics=statistics)
    return check_program(program, decision.schedule)


def evaluation_program(
    decision: Decision, graph: Graph, prologue: Collection[str] = (), statistics: tuple[int, ...] = ()
) -> Program:
    """Return the program of an evaluation, which runs the stages one after the other on their first ranks.

    Sequences are whole and no statistics are shared in an evaluation: `prologue` and `statistics` are not looked at.
    Each stage is routed on a rank of its own, so the schedule need not know which stages share a rank.
    """
    apart = tuple(replace(stage, ranks=(number,)) for number, stage in enumerate(decision.stages))
    program = forward_program(route(replace(decision, stages=apart, world=len(apart)), graph))
    return replace(program, world=decision.world, stage_ranks=tuple(stage.ranks for stage in decision.stages))


def require_updatable(decision: Decision, graph: Graph, scale: float) -> None:
    """Raise RefusedError where gradients are not complete after the backward of one micro-batch on one rank, as an
    asynchronous schedule needs them.  scale: of the loss."""
    problems = {
        "replicas": any(len(stage.ranks) > 1 for stage in decision.stages),
        "parameters that several stages share": bool(tied(decision, graph)),
        "half-precision parameters": any(p.trainable and p.dtype in ("float16", "bfloat16") for p in graph.params),
        "a loss scale": scale != 1,
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise RefusedError(
            f"schedule {decision.schedule} cannot train with {' and '.join(found)}",
            why="it updates the weights of a stage after the backward of each micro-batch",
            fix="use a synchronous schedule, or a plan with one rank for each stage and fp32 parameters of its own",
        )
