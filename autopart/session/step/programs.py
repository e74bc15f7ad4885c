"""The program of one kind of batch: of a training step, or of an evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopart.ir.decision import Decision
from autopart.ir.graph import Graph
from autopart.ir.program import Program
from autopart.passes.program.routing import route
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


def evaluation_program(decision: Decision, graph: Graph) -> Program:
    """Return the program of an evaluation, which runs the stages one after the other on their first ranks.

    Each stage is routed on a rank of its own, so the schedule need not know which stages share a rank.
    """
    apart = tuple(replace(stage, ranks=(number,)) for number, stage in enumerate(decision.stages))
    program = forward_program(route(replace(decision, stages=apart, world=len(apart)), graph))
    return replace(program, world=decision.world, stage_ranks=tuple(stage.ranks for stage in decision.stages))
