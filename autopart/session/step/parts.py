"""The rows of a batch that a rank has, and the inputs of its first stage."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autopart.batch.batch import Batch, split_rows
from autopart.ir.actions import COMPUTES, FORWARD, Slot, parse_action
from autopart.ir.errors import RefusedError, UsageWarning
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.ir.shares import parts, parts_of_all
from autopart.passes.program.routing import route, tied
from autopart.passes.program.verify import check_program
from autopart.runtime.group.world import World
from autopart.runtime.sums.replicas import Replicated
from autopart.session.placement import Placement
from autopart.stagecode.split import own_updates

ONE, SEVERAL = range(1, 2), range(2, 1 << 60)
"""Numbers of rows on which a model may run two programs."""
_ALL = 1 << 40  # the share of a replica that has all rows, beside shares of 1


def micro_cut(rows: int, planned: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a whole batch: as many micro-batches as planned, or fewer of the planned
    size for a batch with fewer rows than micro-batches, such as the last of an epoch."""
    return split_rows(rows, len(planned) if rows >= len(planned) else -(-rows // max(planned)))


def fitting_cut(rows: int, decision: Decision, fitting: range) -> tuple[int, ...]:
    """Return `micro_cut`, or fewer micro-batches, whose parts all have fitting numbers of rows, () if none do.

    O(micro-batches * replicas)."""
    divisions = [stage.division for stage in decision.stages]
    for micros in range(len(micro_cut(rows, decision.micro_rows)), 0, -1):
        found = split_rows(rows, micros)
        if all(own in fitting for each in divisions for size in {*found} for own in parts(each, 0, size) if own):
            return found
    return ()


def undivided(decision: Decision) -> Decision:
    """Return a decision whose micro-batches each run whole on one replica of each stage: the first, or whose turn it is
    (the shares of the other replicas round to no row)."""
    alone = (replace(s, shares=(_ALL, *[1] * (s.replicas - 1))) if s.division.splits else s for s in decision.stages)
    return replace(decision, stages=tuple(alone))


def of_micros(decision: Decision, micros: int) -> Decision:
    """Return a decision for this number of micro-batches, at most as many as planned.  An order that the plan fixes
    (`Decision.order`) loses the computes of those that are missing, which nothing else waits for.  O(computes)."""
    order = decision.order
    if micros < len(decision.micro_rows):
        order = tuple(
            " ".join(word for word in text.split() if parse_action(word).micro < micros) for text in decision.order
        )
    return replace(decision, micro_rows=(1,) * micros, order=order)


def code_sizes(planned: Stage, rank: int, micro_rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows for which a rank of this stage needs code, the largest first.  A rank without rows
    uses the largest of the others, since it holds the same tensors."""
    replica = planned.ranks.index(rank)
    every = parts_of_all(planned.division, tuple(micro_rows))
    return sorted({own[replica] for own in every} - {0} or {max(map(max, every))}, reverse=True)


def inputs_of(
    batch: Batch, names: Sequence[str], sizes: Sequence[int], device: torch.device, wanted: Sequence[int]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Cut a batch into parts of these sizes, and return the inputs of the wanted parts that have rows, by place."""
    filled = [place for place, rows in enumerate(sizes) if rows]
    if not filled:
        return {}
    pieces = dict(zip(filled, batch.micro(tuple(sizes[place] for place in filled)), strict=True))
    return {
        place: {n: t.to(device, non_blocking=True) for n, t in zip(names, pieces[place], strict=True)}
        for place in wanted
        if place in pieces
    }


def digest(tensors: Iterable[torch.Tensor]) -> float:
    """Return 52 bits of a hash of the sums of all rows, which differs, in all likelihood, between batches with other
    rows or another order.  Reads the tensors once."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        data = tensor.detach().contiguous()
        rows = data.reshape(data.shape[0] if data.dim() and data.numel() else 1, -1)
        words = rows.view(torch.int32 if rows.shape[1] * rows.itemsize % 4 == 0 and rows.numel() else torch.uint8)
        found.update(str(words.sum(1, dtype=torch.int64).tolist()).encode())
    return float(int.from_bytes(found.digest(), "little") >> 12)


def warn_of_other_batches(world: World, batch: Batch | None, needing: Sequence[int]) -> None:
    """Warn, on rank 0, of ranks that were given another batch than the first stage, whose batch is the one that counts.
    batch: of this rank, None without one.  needing: ranks of the first stage.  Collective; reads the tensors once."""
    found = world.gather_numbers([0.0 if batch is None or batch.stands_in else digest(batch.tensors)])
    first = needing[0]
    other = next((r for r, (own,) in enumerate(found) if own not in (0.0, *found[first]) and r not in needing), None)
    if other is not None and world.rank == 0:
        warnings.warn(
            f"ranks {first} and {other} were given different batches; only that of rank {first} is used, and rows that "
            "other ranks have are left out: give every rank the same batches (no DistributedSampler, no "
            "accelerator.prepare(loader), the same seed for shuffling), or None where pipe.needs_data is False",
            UsageWarning,
            stacklevel=2,
        )


def training_program(
    decision: Decision,
    graph: Graph,
    prologue: Collection[str],
    placement: Placement,
    statistics: tuple[int, ...],
    steady: Collection[str],
) -> Program:
    """Return the verified program of a training step.  prologue: as for `routing.route`.  placement: of the plan.
    statistics: stages whose replicas share batch statistics.  steady: buffers that a step updates once.  Raises
    ProgramError, and RefusedError (`require_buffers_in_order`)."""
    sharing = {each.stage for each in placement.sharing}
    routed, parted = route(decision, graph, prologue, sharing, placement.tied), tuple(placement.cuts)
    program = replace(routed, statistics=statistics, parted=parted)
    check_program(program, decision.schedule)
    require_buffers_in_order(program, decision, graph, steady)
    return program


def require_buffers_in_order(program: Program, decision: Decision, graph: Graph, steady: Collection[str]) -> None:
    """Raise RefusedError if a rank of a stage that updates buffers does not run its micro-batches in order.

    steady: buffers that a step updates once, which are named where a stage has no others (a runner knows by the order
    when a step ends, so they need it too).  O(computes).
    """
    own = {s: own_updates(graph, set(stage.ops)) for s, stage in enumerate(decision.stages)}
    updating = {s: min(names, key=lambda name: name in steady) for s, names in own.items() if names}
    last: dict[tuple[int, int], Slot] = {}
    for action in program.order if updating else ():
        slot = action.slot
        if action.kind != COMPUTES[FORWARD] or slot.stage not in updating:
            continue
        rank = slot.stage, slot.micro % program.division(slot.stage).period
        if slot < last.setdefault(rank, slot):
            raise RefusedError(
                f"schedule {decision.schedule} runs micro-batch {slot.micro} behind {last[rank].micro}",
                where=f"stage {slot.stage}, which updates buffer {updating[slot.stage]}",
                why="each micro-batch sees the buffers that the one before it left, as in one process",
                fix="use a schedule whose forwards run in order on every stage",
            )
        last[rank] = slot


def replicated_of(
    graph: Graph, decision: Decision, stage: int, owners: Mapping[str, int], placement: Placement
) -> Replicated:
    """Return what the replicas of a stage keep equal, without parameters that other stages use too: these are summed
    over all their ranks at once.  Pieces are summed over the replicas that have the same one.  owners: of this rank's
    parameters (`Replicated.owners`)."""
    chosen, apart = set(decision.stages[stage].ops), {name for name, _ in tied(decision, graph, placement.tied)}
    trained = {param.name for param in graph.params if param.trainable} - apart
    released: dict[str, None] = {}  # by first use: a gradient is complete after the backward of that op
    sparse: set[str] = set()
    dense: set[str] = set()  # the sum of a dense and a sparse gradient is dense
    for op in graph.ops:
        if op.name in chosen:
            used = [name for name in op.params if name in trained]
            released.update(dict.fromkeys(used))
            (sparse if ("sparse", True) in op.attrs else dense).update(used)
    read = {name for op in graph.ops if op.name in chosen for name in op.params}
    return Replicated(
        tuple(reversed(released)),
        frozenset(sparse - dense),
        own_updates(graph, chosen),
        {name: owner for name, owner in owners.items() if name in read},
        decision.bucket_bytes,
        frozenset(name for name in released if name in placement.cuts),
    )
