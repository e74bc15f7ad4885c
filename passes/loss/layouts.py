"""How values hold the rows of a micro-batch, so that replicas can cut them and put them together.

The same analysis that says how losses combine says it of every value.  A value that passes between stages with other
numbers of replicas has to be rows that stand apart (each goes to whoever has that row), or the same on every replica
(whoever needs it takes it from one).  A sum or mean over the rows of a replica is neither.
"""

from __future__ import annotations

from collections.abc import Collection

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.ir.shares import RowLayout
from autopart.passes.loss.analysis import analyse
from autopart.passes.loss.derive import require_proven, where_of
from autopart.passes.ops.placement import INDEX, REPLICATE, SHARD, UNPROVEN, RowPlacement

_FIX = "use replicas=1, the same number of replicas for every stage, or other cuts"
_WHY = {
    INDEX: "it holds numbers of rows, counted from the first row of a replica",
    UNPROVEN: "no rule says how it holds the rows, and numbers do not show it either",
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
    """The layout of each of these values, None of one that holds no rows.

    graph, other, proven: as for `derive_loss_weight`.  crossing: values that pass between stages with other replicas.
    drawn: what random ops read and write in a stage with replicas.  whole: numbers that stand for the whole batch
    wherever they are read.  Raises RefusedError for a value that cannot be divided, and UnprovenRows.  O(ops).
    """
    placements = analyse(graph, other, proven, whole)
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
