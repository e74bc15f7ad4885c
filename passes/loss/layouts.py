"""How values hold the rows of a micro-batch, so that replicas can cut them and join them.

The analysis of losses (`analysis`) tells it for every value.  A value that passes between stages with different numbers
of replicas must hold its rows apart (each goes to the replica with that row), or be the same on every replica.  A sum
or mean over the rows of a replica is neither.
"""

from __future__ import annotations

from collections.abc import Collection

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.ir.shares import RowLayout
from autopart.passes.loss.analysis import Analysis
from autopart.passes.loss.derive import require_proven, where_of
from autopart.passes.ops.placement import INDEX, REPLICATE, SHARD, UNPROVEN, RowPlacement

_FIX = "use replicas=1, the same number of replicas for every stage, or other cuts"
_WHY = {
    INDEX: "it holds row numbers, counted from the first row of a replica",
    UNPROVEN: "no rule says how it holds the rows, and a numeric test did not show it either",
}


def find_layouts(
    graph: Graph,
    other: Graph,
    crossing: Collection[str],
    drawn: Collection[str],
    *,
    whole: frozenset[str] = frozenset(),
    proven: frozenset[str] = frozenset(),
) -> dict[str, RowLayout | None]:
    """The layout of each of these values, None for one that holds no rows.

    graph, other, proven: as for `derive_loss_weight`.  crossing: values between stages with different numbers of
    replicas.  drawn: values that random ops of a stage with replicas read and write.  whole: numbers of the whole batch
    that every micro-batch gets.  Raises RefusedError for a value that cannot be divided, and UnprovenRows.  O(ops).
    """
    placements = Analysis(graph, other, whole)(proven)
    axes = {value.name: value.rows_axis for value in graph.values}
    asked = [*crossing, *(name for name in drawn if axes.get(name) is not None)]
    require_proven(graph, placements, asked, proven)
    found: dict[str, RowLayout | None] = dict.fromkeys(drawn)
    for name in asked:
        found[name] = _layout(graph, name, placements[name], crosses=name in crossing)
    return found


def _layout(graph: Graph, name: str, placement: RowPlacement, *, crosses: bool) -> RowLayout | None:
    if placement.tag == SHARD and (placement.plain or not crosses):
        return RowLayout(placement.axis, max(1, placement.stride_factor))
    if placement.tag == REPLICATE and placement.plain:
        return None
    refusal = RefusedError(
        f"value {name} cannot be divided between replicas",
        where=where_of(graph, graph.writer().get(name, name)),
        why=_WHY.get(placement.tag, "")
        or placement.why
        or "it is a sum or a mean over the rows that a replica has, and another stage has other replicas",
        fix=_FIX,
    )
    refusal.value = name
    raise refusal
