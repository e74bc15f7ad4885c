"""What weighs the losses of a batch that comes in shards: counted where the rows are, put together everywhere.

Replicas of other stages have other rows of a micro-batch than those of the first, so rows are counted in pieces that
no window of any stage cuts.  Counts and sums add up over pieces; a share follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopart.ir.graph import LossReduction
from autopart.ir.shares import Division
from autopart.session.batch_counts import PartWeights, Weights


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a batch, in order.  rows: of each; owners: the replica of the first stage that has it; of: by
    division, for each part of a micro-batch, as `PartWeights` has them, the places of its pieces."""

    rows: tuple[int, ...]
    owners: tuple[int, ...]
    of: Mapping[Division, Sequence[Sequence[int]]]

    def own(self, replica: int) -> list[int]:
        """The places of the pieces that a replica of the first stage has, in the order of its rows."""
        return [place for place, owner in enumerate(self.owners) if owner == replica]

    def among(self, replica: int, measured: Sequence[Sequence[float]], width: int) -> list[float]:
        """What a replica measured of its pieces, as one row for all pieces, to be sent; 0 of those of others."""
        found = [[0.0] * width for _ in self.rows]
        for place, numbers in zip(self.own(replica), measured, strict=True):
            found[place] = list(numbers)
        return [number for numbers in found for number in numbers]

    def read(self, flat: Sequence[Sequence[float]], width: int) -> list[Sequence[float]]:
        """What was measured of each piece, from the row of each replica of the first stage (`among`)."""
        return [flat[owner][width * place : width * (place + 1)] for place, owner in enumerate(self.owners)]


def pieces_of(micro_rows: Sequence[int], divisions: Sequence[Division], own: Division) -> Pieces:
    """The pieces under these divisions; own: of the first stage.  O(micro-batches * replicas)."""
    rows: list[int] = []
    owners: list[int] = []
    of: dict[Division, list[list[int]]] = {each: [] for each in divisions}
    for micro, whole in enumerate(micro_rows):
        windows = {each: each.windows(micro, whole) for each in {*divisions, own}}
        cuts = sorted({0, *(window.end for found in windows.values() for window in found)})
        spans = list(pairwise(cuts))
        for each in divisions:
            for window in windows[each]:
                inside = (p for p, (first, end) in enumerate(spans) if window.first <= first and end <= window.end)
                of[each].append([len(rows) + place for place in inside])
        for first, end in spans:
            rows.append(end - first)
            owners.append(next(i for i, w in enumerate(windows[own]) if w.first <= first and end <= w.end))
    return Pieces(tuple(rows), tuple(owners), of)


def weights_of_pieces(reduction: LossReduction, pieces: Pieces, measured: Sequence[Sequence[float]]) -> PartWeights:
    """What weighs each part, from what was measured of each piece (`BatchCounts.measured`)."""
    weights = [reduction, *(item.weight for item in reduction.adjusted)]
    columns = [_amounts(weight, pieces, [row[n] for row in measured]) for n, weight in enumerate(weights)]
    sums = {
        place: sum(
            share * row[len(weights) + place]
            for share, row in zip(_of_each(weights[1 + place], columns[1 + place]), measured, strict=True)
            if share
        )
        for place, item in enumerate(reduction.adjusted)
        if item.reader is None
    }
    found = {}
    for each, parts in pieces.of.items():
        shares, *others = (_shares(weight, column, parts) for weight, column in zip(weights, columns, strict=True))
        numbers = [
            [sums.get(place, column[part]) if inside else 0.0 for place, column in enumerate(others)]
            for part, inside in enumerate(parts)
        ]
        found[each] = Weights(shares, numbers)
    return PartWeights(found)


def _amounts(weight: LossReduction, pieces: Pieces, counted: Sequence[float]) -> list[float]:
    """What the shares of pieces are proportional to; where the whole batch counts nothing, anything will do."""
    amounts = [float(rows) for rows in pieces.rows] if weight.value is None else list(counted)
    return amounts if sum(amounts) else [1.0] * len(amounts)


def _of_each(weight: LossReduction, amounts: Sequence[float]) -> list[float]:
    total = sum(amounts)
    return [1.0 if weight.kind == "sum" else amount / total for amount in amounts]


def _shares(weight: LossReduction, amounts: Sequence[float], parts: Sequence[Sequence[int]]) -> list[float]:
    if weight.kind == "sum":
        return [1.0 if inside else 0.0 for inside in parts]
    total = sum(amounts)
    return [sum(amounts[place] for place in inside) / total for inside in parts]
