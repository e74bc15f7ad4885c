"""Stages whose ranks compute together: replicas that share batch statistics (`sync_batchnorm`), ranks with pieces of
parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autopart.ir.errors import BatchError, RefusedError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.shares import parts_of_all
from autopart.runtime.group.world import World
from autopart.runtime.stages.batch_statistics import KNOWN, BatchStatistics, share_statistics
from autopart.runtime.stages.shard_group import PURPOSE as SHARDS
from autopart.runtime.stages.shard_group import Members, ShardGroup
from autopart.runtime.stages.stage_module import StageModule
from autopart.session.lists import SHARDINGS
from autopart.session.placement import Placement, placement_of
from autopart.session.step.loss_shares import Shares


def synced_stages(world: World, graph: Graph, decision: Decision) -> tuple[int, ...]:
    """Return the stages with replicas that divide micro-batches and normalize by batch statistics.

    Raises RefusedError for statistics that cannot be shared (replicas in turn, token slices, other ops).
    """
    taking = {op.name: op for op in graph.ops if "batch_norm" in op.target and ("training", True) in op.attrs}
    found = [n for n, stage in enumerate(decision.stages) if len(stage.ranks) > 1 and taking.keys() & set(stage.ops)]
    for stage in found:
        if decision.stages[stage].division.in_turn:
            raise RefusedError(
                f"stage {stage} cannot share batch statistics: its replicas take turns",
                why="each has whole micro-batches, and running statistics of its own",
                fix='use policy "split" for that stage, or sync_batchnorm=False',
            )
    if found and decision.token_slices:
        raise RefusedError(
            "replicas cannot share batch statistics of slices of sequences",
            why="those of a slice are not those of the micro-batch",
            fix="plan without slices, or with replicas=1",
        )
    for op in taking.values() if found else ():
        if op.target not in KNOWN:
            raise RefusedError(
                f"the statistics of {op.target} cannot be shared by replicas",
                where=f"module {op.module} at {op.where}",
                fix="use torch.nn.BatchNorm1d, 2d or 3d, or replicas=1",
            )
    return tuple(found)


def rewrites_of(
    world: World, graph: Graph, decision: Decision, placement: Placement, synced: Sequence[int]
) -> dict[int, list[Callable[[StageModule], None]]]:
    """Return what changes the code of each stage whose ranks compute together.

    synced: the stages that share batch statistics; others divide parameters.  Raises RefusedError for ranks that do not
    hold the pieces that they would compute with."""
    found: dict[int, list[Callable[[StageModule], None]]] = defaultdict(list)
    needed = placement_of(graph, replace(decision, zero=0), placement.held)  # who holds what; no state moves here
    for name in {**placement.cuts, **needed.cuts}:
        if needed.owner(name) is not None and needed.pieces(name) != placement.pieces(name):
            raise RefusedError(
                f"{name} is held in pieces, and would be used by a rank without those of others",
                why="evaluation and predictions run on the first rank of a stage",
                fix="call the model itself inside `with pipe.full_parameters():`",
            )
    for number, stage in enumerate(decision.stages):
        dividing = [each for each in SHARDINGS if each.axes(graph, stage)]
        if dividing:
            found[number] += [partial(each.rewrite, world=world, ranks=stage.ranks) for each in dividing]
        if number in synced:
            found[number].append(partial(share_statistics, statistics=BatchStatistics(world, stage.ranks)))
    return found


def members_of(world: World, decision: Decision) -> dict[int, Members]:
    """Return the ranks that compute parts of the rows of this one, by stage; none without tensor parallelism."""
    own = decision.stages_of_rank(world.rank) if decision.shards > 1 else ()
    return {stage: ShardGroup(world, decision.stages[stage].shard_group(world.rank)) for stage in own}


def open_shards(world: World, decision: Decision) -> None:
    """Open the groups of ranks that compute parts of the same rows.  Collective."""
    for stage in decision.stages if decision.shards > 1 else ():
        for first in range(0, len(stage.ranks), stage.shards):
            world.group(stage.ranks[first : first + stage.shards], purpose=SHARDS)


def require_weights(micro_rows: tuple[int, ...], shares: Shares) -> BatchError | None:
    """Return the error for rows without weight in the loss, None if there are none: their backward would be left out
    on one replica alone."""
    for division, micros in shares.items():
        for micro, (own, replicas) in enumerate(zip(parts_of_all(division, micro_rows), micros, strict=True)):
            if any(rows and 0.0 in share for rows, share in zip(own, replicas, strict=True)):
                return BatchError(
                    f"the rows that a rank has of micro-batch {micro} carry no weight in the loss",
                    why="all their targets are ignored, and with sync_batchnorm their statistics count all the same",
                    fix="leave such rows out of the batch, or use sync_batchnorm=False",
                )
    return None
