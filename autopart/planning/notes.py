"""Notes of a plan: options that change nothing under it, and the rows over which buffers are updated."""

from __future__ import annotations

from autopart.costs.optimizer_state import narrowest_bytes
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.planning.derive.reduction import coupling_ops


def notes_on(options: Options, plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Write a note for each option that a caller gave and that changes nothing under this plan; where batch statistics
    are not those of the whole batch; and where replicas differ in them."""
    replicas = {
        "zero=1": options.zero == 1,
        "bucket_bytes=": options.bucket_bytes is not None,
        "replica_policy=": options.replica_policy is not None,
        "sync_batchnorm=True": options.sync_batchnorm,
    }
    notes = []
    if all(stage.replicas == 1 for stage in plan.stages):
        notes += [
            f"{name} has no effect: no stage of this plan has replicas" for name, given in replicas.items() if given
        ]
    elif options.sync_batchnorm and not coupling_ops(graph):
        notes.append("sync_batchnorm=True has no effect: the model takes no batch statistics")
    if options.master_weights and narrowest_bytes(graph) >= 4:
        notes.append("master_weights=True has no effect: no trained parameter is in bf16 or fp16")
    norms = {op.name for op in graph.ops if "batch_norm" in op.target and ("training", True) in op.attrs}
    if norms and len(plan.micro_rows) > 1:
        rows = max(plan.micro_rows)
        notes.append(
            f"statistics of BatchNorm are those of each micro-batch ({rows} row{'s' * (rows > 1)}), as when gradients "
            "are accumulated; micro_batches=1 takes those of the whole batch"
        )
    replicated = {name for stage in plan.stages if stage.replicas > 1 for name in stage.ops}
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
