"""The parts of a batch that the replicas of each stage have, as one rank sees them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopart.capture.batch import Batch, split_rows
from autopart.ir.errors import BatchError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.shares import Division, parts
from autopart.passes.program.routing import tied
from autopart.runtime.replicas import Shared
from autopart.session.split import own_updates


class Parts:
    """Which rows of micro-batches this rank has, under a decision.

    stage: of this rank, None where it idles.  replica: its place among the ranks of the stage; division: how these
    divide micro-batches.  divisions: those that stages have, each once.
    """

    def __init__(self, decision: Decision, rank: int) -> None:
        self._decision = decision
        self.stage = decision.stage_of_rank(rank)
        self.divisions = tuple(dict.fromkeys(stage.division for stage in decision.stages))
        self.replica, self.division = 0, self.divisions[0]
        if self.stage is not None:
            planned = decision.stages[self.stage]
            self.replica, self.division = planned.ranks.index(rank), planned.division
        self.first_ranks = decision.stages[0].ranks

    @property
    def divided(self) -> bool:
        """Whether the rows of a micro-batch are divided between replicas of any stage."""
        return any(each.splits for each in self.divisions)

    def own(self, micro_rows: Sequence[int]) -> tuple[int, ...]:
        """The rows that this rank has of each micro-batch."""
        return tuple(parts(self.division, micro, rows)[self.replica] for micro, rows in enumerate(micro_rows))

    def sizes(self, micro_rows: Sequence[int]) -> list[int]:
        """Numbers of rows for which this rank needs code, the largest first: where it has no rows at all, that of those
        that have some, since it holds the same tensors."""
        sizes = set(self.own(micro_rows)) - {0}
        return sorted(sizes or {max(parts_of(micro_rows, self.division))}, reverse=True)

    def all_sizes(self, micro_rows: Sequence[int]) -> list[int]:
        """The numbers of rows that any rank of any stage has, the largest first."""
        sizes = {part for each in self.divisions for part in parts_of(micro_rows, each)}
        return sorted(sizes - {0}, reverse=True)

    def inputs(
        self,
        batch: Batch,
        names: Sequence[str],
        micro_rows: Sequence[int],
        device: torch.device,
        *,
        sharded: bool = False,
    ) -> list[Mapping[str, torch.Tensor]]:
        """The model's inputs for this rank's rows of each micro-batch, by value name; nothing where it has none.
        sharded: whether the batch holds these rows alone."""
        if sharded:
            found = among_all(batch, names, self.own(micro_rows), device, range(len(micro_rows)))
            return [found.get(micro, {}) for micro in range(len(micro_rows))]
        rows, count = parts_of(micro_rows, self.division), self.division.count
        found = among_all(batch, names, rows, device, wanted=range(self.replica, len(rows), count))
        return [found.get(micro * count + self.replica, {}) for micro in range(len(micro_rows))]


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


def parts_of(micro_rows: Sequence[int], divided: Division) -> list[int]:
    """The rows of the parts of all micro-batches: for each in order that of each replica."""
    return [own for micro, rows in enumerate(micro_rows) for own in parts(divided, micro, rows)]


def among_all(
    batch: Batch, names: Sequence[str], sizes: Sequence[int], device: torch.device, wanted: Sequence[int]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """The inputs of those parts that are wanted and have rows, by their places, on a device.  sizes: rows of each."""
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


def shared_of(graph: Graph, decision: Decision, stage: int, owners: Mapping[str, int]) -> Shared:
    """What the replicas of a stage keep alike: parameters of other stages too are summed over all of those at once.
    owners: of its parameters (`Shared.owners`)."""
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
    return Shared(
        tuple(reversed(released)),
        frozenset(sparse - dense),
        own_updates(graph, chosen),
        owners,
        decision.bucket_bytes,
    )
