"""Checks of a request: without the model, and against its number of blocks."""

from __future__ import annotations

from autopart.ir.cluster import Cluster
from autopart.ir.cluster import check as check_cluster
from autopart.ir.errors import UsageError
from autopart.ir.graph import many
from autopart.passes.program.named import FAMILY, SEARCHED
from autopart.passes.program.orders import ONE
from autopart.passes.program.schedules import find
from autopart.passes.search.space import ORDERS, PlanRequest, is_other
from autopart.passes.search.variants.orders import ways


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
    _check_order(request)
    per_rank = request.stages_per_rank if isinstance(request.stages_per_rank, int) else 1
    count = -(-(request.stages or 1) // per_rank)
    if count > cluster.world:
        each = f", {per_rank} on each rank," if per_rank > 1 else ""
        raise UsageError(
            f"{request.stages} stages{each} need {count} {_devices(request)}, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world * per_rank} stages or name a larger cluster",
        )
    _check_fixed(request, cluster, count, per_rank)


def _check_order(request: PlanRequest) -> None:
    """Check the schedule against the number of stages of a rank, and against what it has no order or proof for."""
    name, per_rank = request.schedule, request.stages_per_rank
    if is_other(name) and request.prove_seconds > 0:
        raise UsageError(
            f"nothing can be proved about schedule {name!r}",
            why="the model of the proof has whole backwards and one stage a rank",
            fix="leave prove out or use another schedule",
        )
    if is_other(name) and request.policy == "turn":
        raise UsageError(
            f"schedule {name!r} does not go with replicas that take micro-batches in turn",
            fix='use replica_policy="split" or another schedule',
        )
    if not isinstance(per_rank, int):
        return
    if per_rank > 1 and (request.policy == "turn" or isinstance(request.replicas, tuple)):
        raise UsageError(
            f"stages_per_rank={per_rank} needs equal replicas that share every micro-batch",
            fix='use one number of replicas and replica_policy="split"',
        )
    if request.stages is not None and request.stages % per_rank:
        raise UsageError(
            f"{many(request.stages, 'stage')} cannot be divided into {per_rank} a rank",
            fix=f"use a multiple of {per_rank}, or another stages_per_rank",
        )
    if (is_other(name) or per_rank > 1) and not ways(request):
        several = [other for other in ORDERS if find(other).placement != ONE]
        wanted = ORDERS if name == "auto" else (name,)
        raise UsageError(
            f"schedule {name!r} has no order for {per_rank} stage{'s' if per_rank > 1 else ''} a rank",
            fix=f"use one of {', '.join(several)}, or stages_per_rank=1"
            if per_rank > 1
            else f"use stages_per_rank=2 with {' or '.join(wanted)}",
        )


def _check_fixed(request: PlanRequest, cluster: Cluster, positions: int, per_rank: int) -> None:
    """Check replicas and pins against the number of stages, several (per_rank) of which stand on a position."""
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
            f"{needed} replicas need {needed} {_devices(request)}, but the cluster has {cluster.world}",
            fix=f"use at most {cluster.world} replicas in all, or name a larger cluster",
        )
    if each * positions > cluster.world:
        raise UsageError(
            f"{request.stages} stages of {each} replicas need {each * positions} {_devices(request)}, but the cluster "
            f"has {cluster.world}",
            fix=f"use at most {cluster.world // each * per_rank} stages or {cluster.world // positions} replicas, or "
            "name a larger cluster",
        )
    if request.zero == 1 and not request.may_shard:
        raise UsageError(
            f"zero=1 does not go with schedule {request.schedule!r}",
            why="each micro-batch has its own version of the weights",
            fix="use zero=0 or another schedule",
        )
    names = (request.schedule,) if is_other(request.schedule) else request.schedules
    if request.fixed_slices and not any(find(name).sliced and name != SEARCHED for name in names):
        raise UsageError(
            f"schedule {request.schedule!r} has no order over slices of sequences",
            fix=f"use one of {', '.join(FAMILY)}, or token_slices=None",
        )
    last = (request.stages or cluster.world * per_rank) - 1
    for path, stage in request.pins.items():
        if not 0 <= stage <= last:
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


def _devices(request: PlanRequest) -> str:
    return "devices" if request.shards == 1 else f"groups of {request.shards} devices"
