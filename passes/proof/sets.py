"""Sets of devices that a stage may stand on, as numbers of each type, and the rows that they have of a micro-batch.

Rows are whole.  Sixteen of them on two fast devices and six of a sixth of their speed are 0.8 for each slow one if they
could be divided, and one in fact: all eight are busy, or wait, for as long as a slow one takes for a row.

    If no type of a set had more rows than it computes in less than T, fewer than all rows would be computed, for the
    least T in which all can be.  So whatever shares a stage has, one type of its devices has at least one row more; and
    a type that needs T or longer for a single row has that row, since each replica has rows.

Which rows these are is chosen by the times of the whole model, as if they grew evenly with the rows; what is concluded
holds for any choice.  Assumed: more rows take no less, and a part of the rows at least its part of the time.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Floats
from autopart.passes.search.space import SearchSpace, block_costs

Taken = tuple[int, ...]
"""The devices of each type."""
FEW_ROWS = 16
"""Rows up to which a part of a micro-batch is costed as it is, above as its part of the whole."""


def counts_of(space: SearchSpace) -> Taken:
    """Return the devices of each type of the cluster."""
    counts = space.costs.cluster.types
    return tuple([counts[kind] for kind in space.costs.device_types])


def sets_of(space: SearchSpace, widest: int, most: int) -> list[Taken] | None:
    """Return the sets that a stage of at most `widest` devices may stand on; None if they may be more than `most`."""
    counts, wanted = counts_of(space), space.request.replicas
    if prod(count + 1 for count in counts) > most:
        return None
    asked = wanted if isinstance(wanted, tuple) else (wanted,)
    every = product(*(range(count + 1) for count in counts))
    return [taken for taken in every if 0 < sum(taken) <= widest and (asked == (None,) or sum(taken) in asked)]


def rates_of(space: SearchSpace, rows: int) -> list[float]:
    """Return the nanoseconds of all blocks, both ways, for a row of a micro-batch of so many, on each type."""
    return [max(1.0, float(both_ways.sum())) / rows for both_ways in block_costs(space, rows)[:, :2]]


def part_ns(space: SearchSpace, kind: int, own: int, rows: int) -> Floats:
    """Return the costs of each block on a type of device, by field, at these rows of so many in a micro-batch."""
    exact = own <= FEW_ROWS
    costs = space.chain.range_costs(Size(own if exact else rows), kind).blocks
    return np.asarray(costs * (1.0 if exact else own / rows), dtype=np.float64)


def rows_needed(taken: Taken, rates: list[float], rows: int) -> list[tuple[int, int]]:
    """Return (type, rows) of which at least one holds, whatever shares the devices have: the type has so many rows.

    O(types^2 * rows).
    """
    kinds = [kind for kind, count in enumerate(taken) if count]
    if len(kinds) == 1:
        return [(kinds[0], -(-rows // taken[kinds[0]]))]
    times: dict[int, Floats] = {kind: np.arange(1, rows + 1, dtype=np.float64) * rates[kind] for kind in kinds}
    every = np.sort(np.concatenate([times[kind] for kind in kinds]))
    every = every[every >= max(rates[kind] for kind in kinds)]
    done = sum(taken[kind] * np.searchsorted(times[kind], every, side="right") for kind in kinds)
    least = float(every[done >= rows][0])
    fewer = {kind: int(np.searchsorted(times[kind], least, side="left")) for kind in kinds}
    slow = [kind for kind in kinds if not fewer[kind]]
    if slow:
        return [(max(slow, key=lambda kind: rates[kind]), 1)]
    return [(kind, min(rows, fewer[kind] + 1)) for kind in kinds]
