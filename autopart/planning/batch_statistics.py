"""Notes on the rows over which a plan takes batch statistics, and from which it updates other buffers."""

from __future__ import annotations

from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.planning.derive.reduction import coupling_ops


def batch_statistics(options: Options, plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Write a note where batch statistics are not those of the whole batch, and one where replicas differ in them."""
    notes = []
    norms = {op.name for op in graph.ops if "batch_norm" in op.target and ("training", True) in op.attrs}
    if norms and len(plan.micro_rows) > 1:
        rows = max(plan.micro_rows)
        notes.append(
            f"statistics of BatchNorm are those of each micro-batch ({rows} row{'s' * (rows > 1)}), as when gradients "
            "are accumulated; micro_batches=1 takes those of the whole batch"
        )
    replicated = {name for stage in plan.stages if len(stage.ranks) > 1 for name in stage.ops}
    if replicated & coupling_ops(graph, synced=options.sync_batchnorm):
        own = "micro-batches" if any(stage.policy == "turn" for stage in plan.stages) else "rows"
        notes.append(
            f"statistics of BatchNorm are per replica, each of its own {own}; so is any buffer the step updates"
        )
    return tuple(notes)


def moving(plan: Plan, graph: Graph, steady: frozenset[str]) -> tuple[str, ...]:
    """Write a note on buffers that every micro-batch updates, but for the statistics of norms.  steady: buffers that
    the step updates once."""
    norms = {value for op in graph.ops if "batch_norm" in op.target for value in op.writes}
    found = [buffer for buffer, value in graph.updates if buffer not in steady and value not in norms]
    if not found or len(plan.micro_rows) == 1:
        return ()
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"buffer {found[0]}{more}: each micro-batch updates what the one before it left, {len(plan.micro_rows)} times "
        "a step; micro_batches=1 updates it once, from the whole batch",
    )
