"""Notes on options that change nothing under a plan."""

from __future__ import annotations

from autopart.costs.optimizer_state import narrowest_bytes
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.planning.derive.reduction import couples_rows


def without_effect(options: Options, plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Write a note for each option that a caller gave and that changes nothing under this plan."""
    replicas = {
        "zero=1": options.zero == 1,
        "bucket_bytes=": options.bucket_bytes is not None,
        "replica_policy=": options.replica_policy is not None,
        "sync_batchnorm=True": options.sync_batchnorm,
    }
    notes = []
    if all(len(stage.ranks) == 1 for stage in plan.stages):
        notes += [
            f"{name} has no effect: no stage of this plan has replicas" for name, given in replicas.items() if given
        ]
    elif options.sync_batchnorm and not couples_rows(graph):
        notes.append("sync_batchnorm=True has no effect: the model takes no batch statistics")
    if options.master_weights and narrowest_bytes(graph) >= 4:
        notes.append("master_weights=True has no effect: no trained parameter is in bf16 or fp16")
    return tuple(notes)
