"""What tensor parallelism costs: the graph of one rank of a shard group, the cluster of such groups, and a plan for
groups spelled out for ranks.

The planner sees a group as one device that runs the graph of one of its ranks: values, parameters and work at 1/t where
they are cut, and the exchanges as part of the ops that read what is exchanged.  Assumed: an op that is cut takes 1/t of
its time, but not less than it takes to launch one; an exchange takes the latency of the innermost level and
(t - 1) / t of the bytes of the whole value over its link for each pass, and nothing else uses the link.  Wrong where
products are so small that they reach less of the device, and where exchanges overlap with computes.
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.decision import Decision
from autopart.ir.errors import UsageError
from autopart.ir.graph import Cost, Graph
from autopart.passes.shards.assignment import Assignment, collectives, local_graph
from autopart.passes.shards.choice import choose
from autopart.passes.shards.strategies import NO_DIGIT


def sharded_graph(graph: Graph, cluster: Cluster, shards: int) -> Graph:
    """Return the graph of one rank of a group, with its costs.  cluster: of single ranks.  O(axes)."""
    assignment = choose(graph, shards)
    exchanged = collectives(assignment, graph)
    launch_ns = DEVICE_KINDS[cluster.kind].launch_ns
    link = cluster.levels[0].link

    def passed_ns(size_bytes: int) -> int:
        moved = size_bytes * (shards - 1) // shards
        return link.latency_ns + moved * 10**9 // link.bytes_per_s if size_bytes else 0

    ops = []
    for op in graph.ops:
        there, back = exchanged[op.name]
        cost = _share(op.cost, shards, launch_ns) if _is_cut(assignment, op.name) else op.cost
        fwd_ns, bwd_ns = cost.fwd_ns + passed_ns(there), cost.bwd_ns + passed_ns(back)
        ops.append(replace(op, cost=replace(cost, fwd_ns=fwd_ns, bwd_ns=bwd_ns)))
    return replace(local_graph(graph, assignment), ops=tuple(ops))


def _is_cut(assignment: Assignment, op: str) -> bool:
    return assignment.strategies[op].digit != NO_DIGIT


def _share(cost: Cost, shards: int, launch_ns: int) -> Cost:
    """Return the cost of one part of an op."""

    def least(ns: int) -> int:
        return max(ns // shards, min(ns, launch_ns))

    return replace(
        cost,
        fwd_ns=least(cost.fwd_ns),
        bwd_ns=least(cost.bwd_ns),
        saved_bytes=cost.saved_bytes // shards,
        scratch_bytes=cost.scratch_bytes // shards,
        flops=cost.flops // shards,
        weight_ns=cost.weight_ns // shards,
        weight_bytes=cost.weight_bytes // shards,
    )


def grouped(cluster: Cluster, shards: int) -> Cluster:
    """Return the cluster of groups of ranks, each as one of its devices.  Raises UsageError where groups do not lie
    inside the innermost level."""
    inner = cluster.levels[0].size
    if cluster.world % shards or inner % shards:
        raise UsageError(
            f"tensor_parallel is {shards}, and the innermost level of the cluster has {inner} of {cluster.world} ranks",
            why="each group of ranks that compute together lies inside of it, next to each other",
            fix="use a number that divides both",
        )
    levels = [replace(level, size=level.size // shards) for level in cluster.levels]
    kept = tuple(level for level in levels if level.size > 1) or (levels[-1],)
    return replace(cluster, devices=cluster.devices[::shards], levels=kept)


def spelled_out(decision: Decision, shards: int) -> Decision:
    """Return the decision for ranks of one that was made for groups."""
    stages = [
        replace(stage, ranks=tuple(r * shards + n for r in stage.ranks for n in range(shards)), shards=shards)
        for stage in decision.stages
    ]
    return replace(decision, world=decision.world * shards, stages=tuple(stages))
