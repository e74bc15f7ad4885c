"""Checks of a request: without the model, and against its number of blocks."""

from __future__ import annotations

from autopart.ir.cluster import Cluster
from autopart.ir.cluster import check as check_cluster
from autopart.ir.errors import UsageError
from autopart.passes.program.schedules import AUTOMATIC, find, takes_slices
from autopart.passes.search.space import PlanRequest


def check_request(request: PlanRequest, cluster: Cluster) -> None:
    """Raise UsageError for a request that no model can fulfil on this cluster."""
    check_cluster(cluster)
    if request.prove_seconds > 0 and not request.synchronous:
        raise UsageError(
            f"nothing can be proved about schedule {request.schedule!r}",
            why="its steps overlap",
            fix="leave prove out or use another schedule",
        )
    if request.prove_seconds > 0 and request.policy == "turn":
        raise UsageError(
            "nothing can be proved about replicas that take micro-batches in turn",
            why="the model of the proof has all replicas at work on every micro-batch",
            fix='leave prove out, or use replica_policy="split"',
        )
    for rows in request.micro_rows or ((),):
        if not rows or min(rows) < 1 or max(rows) - min(rows) > 1:
            raise UsageError(
                f"micro-batches of {list(rows)} rows cannot work", why="each needs a row, and they differ by one"
            )
    if request.stages is not None and request.stages < 1:
        raise UsageError(
            f"stages={request.stages} cannot work", fix="use at least 1, or None to let the planner choose"
        )
    if request.cuts and request.stages is not None and request.stages <= len(request.cuts):
        raise UsageError(
            f"{len(request.cuts)} cuts make {len(request.cuts) + 1} stages, but stages={request.stages} was asked for",
            fix=f"leave stages out or use at least stages={len(request.cuts) + 1}",
        )
    count = request.stages or 1
    if count > cluster.world:
        raise UsageError(
            f"{count} stages need {count} devices, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} stages or name a larger cluster",
        )
    _check_fixed(request, cluster)


def _check_fixed(request: PlanRequest, cluster: Cluster) -> None:
    """Check replicas and pins against the number of stages."""
    fixed = request.replicas if isinstance(request.replicas, tuple) else None
    if fixed is not None and request.stages is not None and len(fixed) != request.stages:
        raise UsageError(
            f"{len(fixed)} number{'s' if len(fixed) > 1 else ''} of replicas for {request.stages} stages",
            fix=f"give {request.stages} numbers, or use stages={len(fixed)}",
        )
    each = request.replicas if isinstance(request.replicas, int) else 1
    needed = sum(fixed) if fixed else each
    if needed > cluster.world:
        raise UsageError(
            f"{needed} replicas need {needed} devices, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} replicas in all, or name a larger cluster",
        )
    if each * (request.stages or 1) > cluster.world:
        raise UsageError(
            f"{request.stages} stages of {each} replicas need {each * (request.stages or 1)} devices, but the cluster "
            f"has {cluster.world}",
            fix=f"use at most {cluster.world // each} stages or {cluster.world // (request.stages or 1)} replicas, or "
            "name a larger cluster",
        )
    if request.zero == 1 and not request.may_shard:
        raise UsageError(
            f"zero=1 does not go with schedule {request.schedule!r}",
            why="each micro-batch has its own version of the weights",
            fix="use zero=0 or another schedule",
        )
    if request.fixed_slices and not any(takes_slices(find(name)) for name in request.schedules):
        raise UsageError(
            f"schedule {request.schedule!r} has no order over slices of sequences",
            fix=f"use one of {', '.join(AUTOMATIC)}, or token_slices=None",
        )
    for path, stage in request.pins.items():
        if not 0 <= stage < (request.stages or cluster.world):
            last = (request.stages or cluster.world) - 1
            raise UsageError(
                f"{path} is pinned to stage {stage}, which does not exist",
                fix=f"stages are numbered from 0: pin it to one of 0 to {last}" if last else "pin it to stage 0",
            )


def check_stages(request: PlanRequest, blocks: int) -> None:
    """Raise UsageError if more stages are requested than there are blocks."""
    asked = request.stages or 0
    if asked > blocks:
        raise UsageError(
            f"{asked} stages asked for, but the model has only {blocks} blocks that can stand apart",
            fix=f"use at most stages={blocks}",
        )
