"""Whether a decision is one about a graph: its ops, the way values flow, and what must stand together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.printable import shortened

if TYPE_CHECKING:  # a decision checks itself here
    from autopart.ir.plan import Decision

AGAIN = "make the plan again: autopart.plan(model, cluster, sample=...)"
"""The remedy for a plan that does not fit."""


def check_ops(decision: Decision, graph: Graph) -> None:
    """Rules 2 to 4 of `plan.check_decision`.  Raises PlanError.  O(reads)."""
    where = {name: s for s, stage in reversed(list(enumerate(decision.stages))) for name in stage.ops}
    have = [set(stage.ops) for stage in decision.stages]
    names = {op.name for op in graph.ops}
    for extra in set(where) - names:
        raise PlanError(f"the plan names op {shortened(extra)}, which the graph does not have", fix=AGAIN)
    for missing in sorted(names - set(where)):
        raise PlanError(f"op {missing} of the graph is in no stage", fix=AGAIN)
    _check_updates(graph, have)
    writer = graph.writer()
    for op in graph.ops:
        for s, ops in enumerate(have):
            if op.name not in ops:
                continue
            for read in op.reads:
                source = writer.get(read)
                if source is not None and source not in ops and where[source] > s:
                    raise PlanError(
                        f"value {read} flows back from stage {where[source]} to stage {s}",
                        where=f"op {op.name} {op.module} {op.where}".strip(),
                    )


def _check_updates(graph: Graph, have: list[set[str]]) -> None:
    writer = graph.writer()
    for buffer, value in graph.updates:
        uses = {op.name for op in graph.ops if buffer in op.params} | {writer[value]}
        stages = [s for s, ops in enumerate(have) if not uses.isdisjoint(ops)]
        if len(stages) > 1:
            raise PlanError(
                f"buffer {buffer} is used in stages {', '.join(map(str, stages))} and updated in one of them",
                why="each stage has its own copy: another stage would read a stale one",
                fix=f"keep {', '.join(sorted(uses))} in one stage",
            )
