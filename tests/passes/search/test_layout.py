"""Layouts: who stands where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.oracles.planner_oracle import FASTEST

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.passes.search.layout import SMALL, Layout, layouts, pools_of

WORSE, BETTER = Link(9, 10**8), Link(0, 10**10)


def nodes(count: int, size: int, kinds: tuple[int, ...] = (1,), between: Link = WORSE) -> Cluster:
    """Nodes of equal size; devices of these speeds take turns."""
    world = count * size
    devices = tuple(Device("cpu", 1 << 30, FASTEST // kinds[rank % len(kinds)], 10**9) for rank in range(world))
    return Cluster(devices, (Level(size, Link(0, 10**9)), Level(world, between)))


clusters = st.builds(
    nodes, st.integers(1, 5), st.integers(1, 8), st.sampled_from([(1,), (1, 2)]), st.sampled_from([WORSE, BETTER])
)


def widths_of(layout: Layout, data: st.DataObject) -> list[int]:
    """Random numbers of positions for stages, as many as there is room for."""
    left, widths = layout.depth, []
    while left and (not widths or data.draw(st.booleans())):
        widths.append(data.draw(st.sampled_from([w for w in layout.widths if w <= left])))
        left -= widths[-1]
    return widths


@given(clusters, st.booleans(), st.data())
def test_no_rank_runs_two_stages(c: Cluster, replicas: bool, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(list(layouts(c, replicas=replicas))))
    widths, start = widths_of(layout, data), 0
    used: list[int] = []
    for width in widths:
        ranks = layout.ranks(start, width)
        assert len(ranks) == width * layout.pipeline_replicas
        used += ranks
        start += width
    assert len(set(used)) == len(used) and set(used) <= set(range(c.world))


@given(clusters)
def test_all_layouts_are_there_and_each_is_there_once(c: Cluster) -> None:
    found = list(layouts(c, replicas=True))
    assert len(set(found)) == len(found)
    assert {layout.pipeline_replicas for layout in found} >= {1, c.world}
    assert all(layout.pipeline_replicas * layout.depth <= c.world for layout in found)
    assert all(layout.pipeline_replicas % layout.inner == 0 for layout in found)
    assert all(sorted(layout.order) == list(range(c.world)) for layout in found)
    assert all(layout.pipeline_replicas == 1 for layout in layouts(c, replicas=False))


@given(clusters, st.data())
def test_pipelines_side_by_side_have_the_same_shape(c: Cluster, data: st.DataObject) -> None:
    """Side by side pipelines take turns in a position; what stands behind them is the same, further on."""
    layout = data.draw(st.sampled_from(list(layouts(c, replicas=True))))
    places = {rank: place for place, rank in enumerate(layout.order)}
    for position in range(layout.depth):
        ranks = layout.ranks(position, 1)
        for copy, rank in enumerate(ranks):
            outer, side = divmod(copy, layout.inner)
            assert places[rank] == outer * layout.inner * layout.depth + position * layout.inner + side


@pytest.mark.parametrize(
    ("inner", "stages"), [(4, "00001111"), (2, "00110011"), (1, "01010101")], ids=["append", "both", "scatter"]
)
def test_two_nodes_of_four_devices_as_drawn(inner: int, stages: str) -> None:
    c = nodes(2, 4)
    layout = next(lay for lay in layouts(c, replicas=True) if (lay.pipeline_replicas, lay.inner) == (4, inner))
    home = {rank: stage for stage in range(2) for rank in layout.ranks(stage, 1)}
    assert "".join(str(home[rank]) for rank in range(8)) == stages


def test_beyond_some_positions_stages_have_one_device_in_each_pipeline() -> None:
    assert Layout(1, SMALL, 1, tuple(range(SMALL))).widths == tuple(range(1, SMALL + 1))
    assert Layout(1, SMALL + 1, 1, tuple(range(SMALL + 1))).widths == (1,)


def test_equal_devices_are_laid_out_in_order() -> None:
    assert {lay.order for lay in layouts(nodes(1, 4), replicas=True)} == {(0, 1, 2, 3)}


def test_many_nodes_try_divisors_only() -> None:
    assert {lay.pipeline_replicas for lay in layouts(nodes(4, 8), replicas=True)} == {1, 2, 4, 8, 16, 32}


def test_unlike_devices_are_laid_out_in_every_order_that_differs() -> None:
    """Two fast and two slow ones: six orders, equal devices in order of rank; eight unlike ones: there and back."""
    found = [lay.order for lay in layouts(nodes(1, 4, kinds=(1, 2)), replicas=False)]
    assert len(found) == len(set(found)) == 6 and found[0] == (0, 1, 2, 3)
    assert all(order.index(0) < order.index(2) and order.index(1) < order.index(3) for order in found)
    assert len(list(layouts(nodes(1, 8, kinds=tuple(range(1, 9))), replicas=False))) == 2


def test_where_the_link_between_nodes_is_the_better_one_neighbours_are_also_put_in_different_nodes() -> None:
    orders = {lay.order for lay in layouts(nodes(2, 4, between=BETTER), replicas=True)}
    assert orders == {tuple(range(8)), (0, 4, 1, 5, 2, 6, 3, 7)}


@given(st.lists(st.integers(1, 3), min_size=4, max_size=8), st.data())
def test_stages_take_devices_of_each_kind_in_any_order_and_none_twice(kinds: list[int], data: st.DataObject) -> None:
    c = nodes(1, len(kinds), kinds=tuple(kinds))
    pools = pools_of(c, replicas=True)
    if pools is None:
        assert len(set(kinds)) == 1
        return
    left, used, stages = pools.counts, (0,) * len(pools.counts), []
    while any(left) and (not stages or data.draw(st.booleans())):
        taken = data.draw(st.sampled_from([w for w in pools.widths if all(map(int.__le__, w, left))]))
        left, used = tuple(map(int.__sub__, left, taken)), tuple(map(int.__add__, used, taken))
        stages.append((taken, pools.stage(used, taken)[0]))
    stages.reverse()
    layout = pools.laid_out([taken for taken, _ in stages])
    assert sorted(layout.order) == list(range(c.world))
    start = sum(left)
    for taken, ranks in stages:
        own = layout.ranks(start, sum(taken))
        assert sorted(own) == sorted(ranks) and own == tuple(sorted(own, key=own.index))
        assert tuple(sum(c.devices[r] == c.devices[pool[0]] for r in own) for pool in pools.kinds) == taken
        start += sum(taken)
