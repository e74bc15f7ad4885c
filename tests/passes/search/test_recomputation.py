"""Groups of recomputed blocks: which they are, where they end, and that memory that is left makes them quicker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, layers, plan_of, source

from autopart.ir.errors import InfeasibleError
from autopart.ir.plan import Stage
from autopart.passes.search.recomputation import StageBlocks, _ended_oftener, _groupings, least_recomputed
from autopart.passes.simulation.charges import StageContext
from autopart.passes.simulation.stage_costs import Estimator

SIZES = st.integers(0, 30)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=10), st.data())
def test_groups_are_neighbours_and_hold_each_chosen_block_once(rows: list[tuple[int, int, int]], data: st.DataObject):
    saved, fwd, crossing = map(list, zip(*rows, strict=True))
    blocks = StageBlocks(tuple(f"b{i}" for i in range(len(rows))), saved, fwd, [0] * len(rows), crossing)
    order = blocks.by_worth()
    assert sorted(order) == list(range(len(rows)))
    chosen = frozenset(order[: data.draw(st.integers(1, len(rows)))])
    live = data.draw(st.integers(1, 6))
    ways = [(live * each + most, groups) for each, most, groups in _groupings(blocks, chosen)]
    for _, groups in ways:
        assert sorted(place for group in groups for place in group) == sorted(chosen)
    needed = min(kept for kept, _ in ways)
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
    estimator = Estimator(c, source(g, c).cost_model)
    stage = Stage(tuple(op.name for op in g.ops), (0,))
    context = StageContext(stage, 1, 8, 8, True, 1, 0, 0, 0)
    blocks = StageBlocks(stage.ops, [100] * 8, [10] * 8, [0] * 8, [1, 40, 1, 40, 1, 40, 1, 40])
    one = estimator.stage(context).peak_bytes - 8 * 800 + 8 * 3 + 200
    found = least_recomputed(context, blocks, estimator, one, {}, everything=False)
    assert found.recompute == (("v0", "v1"), ("v2", "v3"), ("v4", "v5"), ("v6", "v7"))
    roomier = least_recomputed(context, blocks, estimator, one + 8 * 100, {}, everything=False)
    assert sum(map(len, roomier.recompute)) == 7
    everything = least_recomputed(context, blocks, estimator, one + 8 * 100, {}, everything=True)
    assert sum(map(len, everything.recompute)) == 8
    nothing_fits = least_recomputed(context, blocks, estimator, 1, {}, everything=False)
    assert nothing_fits.recompute == (stage.ops,)


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=2, max_size=10), st.integers(1, 6), st.integers(0, 200))
def test_where_memory_is_left_groups_end_at_more_blocks(rows: list[tuple[int, int, int]], live: int, room: int):
    """What ends a group is not run again; what that keeps never exceeds the limit."""
    saved, tail, crossing = map(list, zip(*rows, strict=True))
    blocks = StageBlocks(tuple(map(str, range(len(rows)))), saved, [30] * len(rows), tail, crossing)
    way = (sum(saved), [range(len(rows))])
    kept, groups = _ended_oftener(way, blocks, live, sum(saved) + room)
    assert [place for group in groups for place in group] == list(range(len(rows)))
    assert kept == sum(saved) + live * sum(crossing[group.start] for group in groups[1:]) <= sum(saved) + room
    begins = {group.start for group in groups}
    left = sum(saved) + room - kept
    for place in range(1, len(rows)):
        assert place in begins or not tail[place - 1] or live * crossing[place] > left


LAYERS = tuple(tuple(op.name for op in layers(4).ops if op.module.startswith(f"layers.{i}")) for i in range(4))


def test_everything_is_recomputed_in_groups_that_keep_little() -> None:
    chain = graph("; ".join(f"v{i}:10 #40 ^100 @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(16)))
    plan = plan_of(chain, cluster(1), stages=1, micros=2, recompute="all")
    (stage,) = plan.stages
    assert sum(map(len, stage.recompute)) == 16 and 2 < len(stage.recompute) < 16
    assert plan.estimates[0].activation_bytes + plan.estimates[0].workspace_bytes < 700  # without: 1600


@pytest.mark.parametrize("memory", [1600, 3000])
def test_everything_is_recomputed_under_a_searched_order(memory: int) -> None:
    """Also where the order was searched with everything recomputed, as little memory demands."""
    c, asked = cluster(2, memory=memory), {"stages": 2, "replicas": 1, "recompute": "all", "schedule": "searched"}
    plan = plan_of(layers(8), c, **asked)
    assert plan.decision.order and all(sum(map(len, stage.recompute)) == len(stage.ops) for stage in plan.stages)


def test_what_is_asked_for_is_recomputed_to_the_op_and_nothing_else_is() -> None:
    plan = plan_of(layers(4), cluster(2), stages=2, recompute="off", recomputed=(LAYERS[0], LAYERS[3]))
    assert [stage.recompute for stage in plan.stages] == [(LAYERS[0],), (LAYERS[3],)]
    free = plan_of(layers(4), cluster(2), stages=2)
    assert sum(e.recompute_ns for e in plan.estimates) > sum(e.recompute_ns for e in free.estimates) == 0


def test_what_the_memory_demands_comes_on_top_where_it_may() -> None:
    chain = graph("; ".join(f"v{i}:10 #1 ^100 @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(8)))
    tight = cluster(1, memory=500)
    asked = {"stages": 1, "micros": 2, "recomputed": (("v0", "v1"),)}
    with pytest.raises(InfeasibleError):
        plan_of(chain, tight, recompute="off", **asked)
    (stage,) = plan_of(chain, tight, recompute="auto", **asked).stages
    again = [name for group in stage.recompute for name in group]
    assert stage.recompute[0] == ("v0", "v1") and 2 < len(again) < 8 and len(set(again)) == len(again)
