"""The parts of a batch that the replicas of each stage have, as one rank sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from autopart.capture.batch import Batch, split_rows
from autopart.ir.errors import BatchError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.shares import row_shares
from autopart.passes.program.routing import tied
from autopart.runtime.replicas import Shared
from autopart.session.split import own_updates


class Parts:
    """Which rows of micro-batches this rank has, under a decision.

    stage: of this rank, None where it idles.  replica: its place among the ranks of the stage; count: how many there
    are.  counts: the numbers of replicas that stages have, each once, ascending.
    """

    def __init__(self, decision: Decision, rank: int) -> None:
        self._decision = decision
        self.stage = decision.stage_of_rank(rank)
        self.counts = sorted({len(stage.ranks) for stage in decision.stages})
        self.replica, self.count = 0, self.counts[0]
        if self.stage is not None:
            ranks = decision.stages[self.stage].ranks
            self.replica, self.count = ranks.index(rank), len(ranks)
        self.first_ranks = decision.stages[0].ranks

    @property
    def replicated(self) -> bool:
        """Whether any stage has replicas."""
        return self.counts[-1] > 1

    def own(self, micro_rows: Sequence[int]) -> tuple[int, ...]:
        """The rows that this rank has of each micro-batch."""
        return tuple(row_shares(rows, self.count)[self.replica] for rows in micro_rows)

    def sizes(self, micro_rows: Sequence[int]) -> list[int]:
        """Numbers of rows for which this rank needs code, the largest first: where it has no rows at all, that of those
        that have some, since it holds the same tensors."""
        sizes = set(self.own(micro_rows)) - {0}
        return sorted(sizes or {row_shares(max(micro_rows), self.count)[0]}, reverse=True)

    def all_sizes(self, micro_rows: Sequence[int]) -> list[int]:
        """The numbers of rows that any rank of any stage has, the largest first."""
        sizes = {part for count in self.counts for part in parts_of(micro_rows, count)}
        return sorted(sizes - {0}, reverse=True)

    def inputs(
        self, batch: Batch, names: Sequence[str], micro_rows: Sequence[int], device: torch.device
    ) -> list[Mapping[str, torch.Tensor]]:
        """The model's inputs for this rank's rows of each micro-batch, by value name; nothing where it has none."""
        parts = parts_of(micro_rows, self.count)
        found = among_all(batch, names, parts, device, wanted=range(self.replica, len(parts), self.count))
        return [found.get(micro * self.count + self.replica, {}) for micro in range(len(micro_rows))]


def micro_rows_of(batch: Batch, planned: Sequence[int]) -> tuple[int, ...]:
    """Rows of each micro-batch: as many micro-batches as planned, and of a batch with fewer rows than that, as the last
    of an epoch may be, as many as it takes with the planned rows.  Raises BatchError for a batch without rows."""
    micros = len(planned)
    if batch.rows is not None:
        return split_rows(batch.rows, micros if batch.rows >= micros else -(-batch.rows // max(planned)))
    if micros > 1:
        raise BatchError(
            f"the batch has no rows to cut into {micros} micro-batches",
            why="none of its tensors has an axis",
            fix="pass a batch like the sample that was planned for",
        )
    return (1,)


def parts_of(micro_rows: Sequence[int], count: int) -> list[int]:
    """The rows of the parts of all micro-batches: for each in order that of each of `count` replicas."""
    return [own for rows in micro_rows for own in row_shares(rows, count)]


def among_all(
    batch: Batch, names: Sequence[str], parts: Sequence[int], device: torch.device, wanted: Sequence[int]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """The inputs of those parts that are wanted and have rows, by their places, on a device."""
    filled = [place for place, rows in enumerate(parts) if rows]
    pieces = dict(zip(filled, batch.micro(tuple(parts[place] for place in filled)), strict=True))
    return {
        place: {n: t.to(device, non_blocking=True) for n, t in zip(names, pieces[place], strict=True)}
        for place in wanted
        if place in pieces
    }


def digest(batch: Batch) -> float:
    """A number that differs, in all likelihood, between batches of other rows or another order of them: 52 bits of a
    hash of the sums of their rows.  Reads the batch once."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in batch.tensors:
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
        fix="pass every rank the same batch: no DistributedSampler, and the same seed for the data loader everywhere",
    )


def shared_of(graph: Graph, decision: Decision, stage: int) -> Shared:
    """What the replicas of a stage keep alike: parameters of other stages too are summed over all of those at once."""
    chosen, apart = set(decision.stages[stage].ops), {name for name, _ in tied(decision, graph)}
    trained = {param.name for param in graph.params if param.trainable} - apart
    released: dict[str, None] = {}  # in the order of their first use: a gradient is complete when that one is over
    sparse: set[str] = set()
    for op in graph.ops:
        if op.name in chosen:
            used = [name for name in op.params if name in trained]
            released.update(dict.fromkeys(used))
            sparse.update(used if ("sparse", True) in op.attrs else ())
    return Shared(tuple(reversed(released)), frozenset(sparse), own_updates(graph, chosen))
