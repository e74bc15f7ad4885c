"""Which rows of a batch a rank has, and the inputs that its first stage is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopart.capture.batch.batch import Batch, split_rows
from autopart.ir.errors import BatchError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Stage
from autopart.ir.shares import parts
from autopart.passes.program.routing import tied
from autopart.runtime.sums.replicas import Replicated
from autopart.session.code.split import own_updates


def rows_of_rank(planned: Stage, rank: int, micro_rows: Sequence[int]) -> tuple[int, ...]:
    """The rows that a rank of this stage has of each micro-batch."""
    replica = planned.ranks.index(rank)
    return tuple(parts(planned.division, micro, rows)[replica] for micro, rows in enumerate(micro_rows))


def code_sizes(planned: Stage, rank: int, micro_rows: Sequence[int]) -> list[int]:
    """Numbers of rows for which a rank of this stage needs code, the largest first.  A rank without rows takes those of
    the others, since it holds the same tensors."""
    division = planned.division
    every = (part for micro, rows in enumerate(micro_rows) for part in parts(division, micro, rows))
    return sorted(set(rows_of_rank(planned, rank, micro_rows)) - {0} or {max(every)}, reverse=True)


def stage_inputs(
    batch: Batch,
    names: Sequence[str],
    planned: Stage,
    rank: int,
    micro_rows: Sequence[int],
    device: torch.device,
    *,
    sharded: bool,
) -> list[Mapping[str, torch.Tensor]]:
    """The model's inputs for the rows that a rank of the first stage has of each micro-batch, by value name; empty
    where it has none.  sharded: whether the batch holds these rows alone."""
    if sharded:
        sizes, places = list(rows_of_rank(planned, rank, micro_rows)), list(range(len(micro_rows)))
    else:
        division, replica = planned.division, planned.ranks.index(rank)
        sizes = [own for micro, rows in enumerate(micro_rows) for own in parts(division, micro, rows)]
        places = list(range(replica, len(sizes), division.count))
    found = inputs_of(batch, names, sizes, device, places)
    return [found.get(place, {}) for place in places]


def micro_cut(rows: int, planned: Sequence[int]) -> tuple[int, ...]:
    """The rows of each micro-batch of a whole batch of so many rows; see `micro_rows_of`."""
    return split_rows(rows, len(planned) if rows >= len(planned) else -(-rows // max(planned)))


def micro_rows_of(batch: Batch, planned: Sequence[int]) -> tuple[int, ...]:
    """Rows of each micro-batch: as many micro-batches as planned, and of a batch with fewer rows than that, as the last
    of an epoch may be, as many as it takes with the planned rows.  Raises BatchError for a batch without rows."""
    if batch.rows is not None:
        return micro_cut(batch.rows, planned)
    if len(planned) > 1:
        raise BatchError(
            f"the batch has no rows to cut into {len(planned)} micro-batches",
            why="none of its tensors has an axis",
            fix="pass a batch like the sample that was planned for",
        )
    return (1,)


def inputs_of(
    batch: Batch, names: Sequence[str], sizes: Sequence[int], device: torch.device, wanted: Sequence[int]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Cut a batch into parts of these sizes; returns the inputs of the wanted parts that have rows, by place."""
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
    """A number that differs, in all likelihood, between batches of other rows or another order of them: 52 bits of a
    hash of the sums of their rows.  Reads the tensors once."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        data = tensor.detach().contiguous()
        rows = data.reshape(data.shape[0] if data.dim() and data.numel() else 1, -1)
        words = rows.view(torch.int32 if rows.shape[1] * rows.itemsize % 4 == 0 and rows.numel() else torch.uint8)
        found.update(str(words.sum(1, dtype=torch.int64).tolist()).encode())
    return float(int.from_bytes(found.digest(), "little") >> 12)


def require_same_batch(digests: Sequence[float], ranks: Sequence[int]) -> BatchError | None:
    """What to raise when the replicas of the first stage were given other batches than each other."""
    if len({digests[rank] for rank in ranks}) == 1:
        return None
    return BatchError(
        "the replicas of the first stage were given different batches",
        where=f"ranks {', '.join(map(str, ranks))}",
        why="the rows of one batch are divided between them here, and what is counted of it is that of the first",
        fix="pass every rank the same batch (no DistributedSampler; the same seed for the data loader everywhere), or "
        "each its own rows, with pipe.step(batch, sharded=True)",
    )


def replicated_of(graph: Graph, decision: Decision, stage: int, owners: Mapping[str, int]) -> Replicated:
    """What the replicas of a stage keep equal.  Left out are parameters that other stages use too: these are summed
    over all their ranks at once.  owners: of the parameters of this rank (`Replicated.owners`)."""
    chosen, apart = set(decision.stages[stage].ops), {name for name, _ in tied(decision, graph)}
    trained = {param.name for param in graph.params if param.trainable} - apart
    released: dict[str, None] = {}  # in the order of their first use: a gradient is complete when that one is over
    sparse: set[str] = set()
    dense: set[str] = set()  # of both the sum is dense
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
    )
