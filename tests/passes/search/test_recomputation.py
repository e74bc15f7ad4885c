"""Groups of recomputed blocks: which they are, where they end, and that no smaller number would fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.graphs import cluster, graph, source

from autopart.ir.plan import Stage
from autopart.passes.search.recomputation import StageBlocks, _best_groups, fewest_recomputed
from autopart.passes.simulation.stage_costs import CostContext, Estimator, StageContext, device_types

SIZES = st.integers(0, 30)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=10), st.data())
def test_groups_are_neighbours_and_hold_each_chosen_block_once(rows: list[tuple[int, int, int]], data: st.DataObject):
    saved, fwd, crossing = map(list, zip(*rows, strict=True))
    blocks = StageBlocks(tuple(f"b{i}" for i in range(len(rows))), saved, fwd, crossing)
    order = blocks.by_worth()
    assert sorted(order) == list(range(len(rows)))
    chosen = frozenset(order[: data.draw(st.integers(1, len(rows)))])
    live = data.draw(st.integers(1, 6))
    needed, groups = _best_groups(blocks, chosen, live)
    assert sorted(place for group in groups for place in group) == sorted(chosen)
    one = sum(saved[place] for place in chosen)
    edges = sum(crossing[i] for i in chosen if i and i - 1 not in chosen)
    assert needed <= live * (sum(saved) - one + edges) + one  # no worse than each run as a whole


def test_a_few_layers_each_where_keeping_them_all_or_one_by_one_does_not_fit() -> None:
    """Four layers of two blocks, wide inside and narrow between: groups end between layers."""
    lines = []
    for i in range(8):
        size = 40 if i % 2 == 0 else 1
        lines.append(f"v{i}:10 #{size} ^100 @m.{i // 2} <- {f'v{i - 1}' if i else 'x'}")
    g, c = graph("; ".join(lines), input_bytes=1), cluster(1)
    estimator = Estimator(CostContext(c, device_types(c), source(g, c).cost_model))
    stage = Stage(tuple(op.name for op in g.ops), (0,))
    context = StageContext(stage, 1, 8, 8, True, 1, 0, 0, 0)
    blocks = StageBlocks(stage.ops, [100] * 8, [10] * 8, [1, 40, 1, 40, 1, 40, 1, 40])
    one = estimator.stage(context).peak_bytes - 8 * 800 + 8 * 3 + 200
    found = fewest_recomputed(context, blocks, estimator, one, everything=False)
    assert found.recompute == (("v0", "v1"), ("v2", "v3"), ("v4", "v5"), ("v6", "v7"))
    roomier = fewest_recomputed(context, blocks, estimator, one + 8 * 100, everything=False)
    assert sum(map(len, roomier.recompute)) == 7
    everything = fewest_recomputed(context, blocks, estimator, one + 8 * 100, everything=True)
    assert sum(map(len, everything.recompute)) == 8
    nothing_fits = fewest_recomputed(context, blocks, estimator, 1, everything=False)
    assert nothing_fits.recompute == (stage.ops,)
