"""The weight, in the loss of the whole batch, of the rows that each replica has of each micro-batch.

Replicas of two stages may have different rows of a micro-batch, so rows are counted in pieces that no replica's window
cuts.  Every rank derives the same shares from the counts of all pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from autopart.ir.graph import Graph, LossReduction
from autopart.ir.shares import Division
from autopart.passes.loss.derive import without_weight

RowPiece = tuple[int, int, int]
"""Rows that stay together: the micro-batch, its first row and the row behind the last."""
Share = tuple[float, ...]
"""The share of a replica's loss in the whole loss, then the number of each adjusted value (`LossReduction`)."""
Shares = Mapping[Division, Sequence[Sequence[Share]]]
"""The share of each replica in each micro-batch, [division][micro][replica]; zeros if it has no rows."""


def is_uneven(shares: Shares) -> bool:
    """Return whether some replica has no weight: a gradient may then be missing on it and not on another."""
    return any(0.0 in share for micros in shares.values() for replicas in micros for share in replicas)


def whole_shares(shares: Shares) -> list[float] | None:
    """Return the shares of whole micro-batches, None if terms of the loss have weights of their own."""
    division = min(shares, key=lambda division: division.splits)
    micros = [replicas[:: division.shards] for replicas in shares[division]]
    if any(len(share) > 1 for replicas in micros for share in replicas):
        return None
    own = [[share[0] for share in replicas] for replicas in micros]
    # Shares of a mean add up to 1 over all replicas; each share of a sum is 1, also that of a whole micro-batch.
    return [max(each) for each in own] if any(1.0 in each for each in own) else [sum(each) for each in own]


@lru_cache(maxsize=256)
def pieces_of(micro_rows: tuple[int, ...], divisions: tuple[Division, ...]) -> tuple[RowPiece, ...]:
    """Return the pieces of a batch under these divisions, in the order of its rows.  O(micro-batches * replicas)."""
    found: list[RowPiece] = []
    for micro, rows in enumerate(micro_rows):
        cuts = {0, *(window.end for each in divisions for window in each.windows(micro, rows))}
        found.extend((micro, first, end) for first, end in pairwise(sorted(cuts)))
    return tuple(found)


@lru_cache(maxsize=256)
def places_of(
    micro_rows: tuple[int, ...], divisions: tuple[Division, ...], division: Division
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the places of the pieces that each replica has, by micro-batch and replica."""
    pieces = list(enumerate(pieces_of(micro_rows, divisions)))
    found = []
    for micro, rows in enumerate(micro_rows):
        inside = [(place, first, end) for place, (at, first, end) in pieces if at == micro]
        windows = division.windows(micro, rows)
        found.append(tuple(tuple(p for p, first, end in inside if w.first <= first and end <= w.end) for w in windows))
    return tuple(found)


def counting_ranks(
    micro_rows: tuple[int, ...], divisions: tuple[Division, ...], ranks: Sequence[int], *, sharded: bool
) -> list[int]:
    """Return the rank that counts each piece: the first one, or for a batch in shards the rank that has the piece.

    divisions: those of all stages, the first stage's first.  ranks: of the first stage.
    """
    found = [ranks[0]] * len(pieces_of(micro_rows, divisions))
    for replicas in places_of(micro_rows, divisions, divisions[0]) if sharded else ():
        for rank, inside in zip(ranks, replicas, strict=True):
            for place in inside:
                found[place] = rank
    return found


def count_width(reduction: LossReduction) -> int:
    """Return how many numbers `BatchCounts.measured` counts of each piece; 0 if shares follow from rows alone."""
    return 1 + 2 * len(reduction.adjusted) if any(True for _ in reduction.counted()) else 0


def loss_shares(
    reduction: LossReduction, micro_rows: tuple[int, ...], divisions: tuple[Division, ...], counts: Sequence[float] = ()
) -> Shares:
    """Return the shares of every replica.  counts: of all pieces, in order (`BatchCounts.measured`); more may follow.

    What counts 0 in the whole batch gets equal shares, which gives the result of one process: 0/0, or the 0 of a clamp.
    """
    pieces, width = pieces_of(micro_rows, divisions), count_width(reduction)
    weights = [reduction, *(item.weight for item in reduction.adjusted)]
    measured = [counts[place * width : (place + 1) * width] for place in range(len(pieces))] if width else []
    amounts = [
        [row[n] for row in measured] if weight.value is not None else [float(end - first) for _, first, end in pieces]
        for n, weight in enumerate(weights)
    ]
    amounts = [column if sum(column) else [1.0] * len(pieces) for column in amounts]
    totals = [sum(column) for column in amounts]

    def share_of(n: int, inside: Sequence[int]) -> float:
        return 1.0 if weights[n].kind == "sum" else sum([amounts[n][place] for place in inside]) / totals[n]

    sums = {
        1 + n: sum(
            share * row[len(weights) + n] for place, row in enumerate(measured) if (share := share_of(1 + n, [place]))
        )
        for n, item in enumerate(reduction.adjusted)
        if item.reader is None
    }

    def shares_of(inside: Sequence[int]) -> Share:
        if not inside:
            return (0.0,) * len(weights)
        return tuple([sums[n] if n in sums else share_of(n, inside) for n in range(len(weights))])

    return {
        each: [[shares_of(inside) for inside in replicas] for replicas in places_of(micro_rows, divisions, each)]
        for each in divisions
    }


def idle_by_slot(
    graph: Graph, reduction: LossReduction, own: Mapping[int, Sequence[Sequence[float]]], rowless: Collection[str]
) -> dict[tuple[int, int], frozenset[str]]:
    """Return the values without weight in the loss, by stage and micro-batch.  own: shares of this rank.

    rowless: values whose gradients come from a rank with other rows, which may have weight where this rank's have none;
    they are left out."""
    return {
        (stage, micro): idle_values(graph, reduction, tuple(share)) - frozenset(rowless)
        for stage, shares in own.items()
        for micro, share in enumerate(shares)
        if 0.0 in share
    }


def idle_values(graph: Graph, reduction: LossReduction, share: Share) -> frozenset[str]:
    """Return the values without weight in a loss with this share: no gradient goes back from them."""
    if share[0] == 0.0:
        return frozenset(graph.value_map())
    terms = zip(reduction.adjusted, share[1:], strict=True)
    dropped = frozenset((a.reader, a.value) for a, number in terms if a.reader is not None and number == 0.0)
    return without_weight(graph, dropped) if dropped else frozenset()
