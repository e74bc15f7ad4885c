"""The partition against every split there is, computed from the definition."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from graphs import cluster, clusters, graph, graphs, layers
from hypothesis import event, given
from hypothesis import strategies as st

from autopart.ir.cluster import Cluster
from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import SCHEDULES, in_flight
from autopart.passes.partition import Split, partition


def stage_ns(g: Graph, c: Cluster, s: int, a: int, b: int) -> int:
    """t_s as the docstring of the module says it, from the ops alone."""
    total = sum(op.cost.total_ns for op in g.ops[a:b])
    if s == 0:
        return total
    own = {w for op in g.ops[a:b] for w in op.writes}
    names = {r for op in g.ops[a:b] for r in op.reads} - own
    values = g.value_map()
    forward = sum(values[n].size_bytes for n in names)
    backward = sum(values[n].size_bytes for n in names if values[n].grad and n not in g.inputs)
    return total + sum(c.link(s - 1, s).transfer_ns(size) for size in (forward, backward) if size)


def stage_bytes(g: Graph, s: int, a: int, b: int, stages: int, micros: int, schedule: str) -> int:
    """The memory constraint's left side, from the ops alone, with Adam's two states."""
    values, params = g.value_map(), g.param_map()
    used = {p for op in g.ops[a:b] for p in op.params}
    held = sum(params[p].size_bytes * (4 if params[p].trainable else 1) for p in used)
    own = {w for op in g.ops[a:b] for w in op.writes} | (set(g.inputs) if s == 0 else set())
    entering = {r for op in g.ops[a:b] for r in op.reads} - own
    live = sum(op.cost.saved_bytes for op in g.ops[a:b]) + sum(values[n].size_bytes for n in entering)
    batch = micros * sum(values[n].size_bytes for n in g.inputs) if s == 0 else 0
    scratch = max(op.cost.scratch_bytes for op in g.ops[a:b])
    return held + in_flight(schedule, s, stages, micros) * live + scratch + batch


def best_by_force(
    g: Graph, c: Cluster, stages: int, micros: int, schedule: str, forced: tuple[int, ...] = ()
) -> int | None:
    best = None
    for inner in combinations(range(1, len(g.ops)), stages - 1):
        bounds = (0, *inner, len(g.ops))
        if not set(forced) <= set(inner):
            continue
        ranges = list(enumerate(pairwise(bounds)))
        if any(stage_bytes(g, s, a, b, stages, micros, schedule) > c.devices[s].memory_bytes for s, (a, b) in ranges):
            continue
        times = [stage_ns(g, c, s, a, b) for s, (a, b) in ranges]
        objective = sum(times) + (micros - 1) * max(times)
        best = objective if best is None else min(best, objective)
    return best


def check_split(split: Split, g: Graph, c: Cluster, micros: int, schedule: str) -> None:
    stages = len(split.bounds) - 1
    ranges = list(enumerate(pairwise(split.bounds)))
    assert split.stage_ns == tuple(stage_ns(g, c, s, a, b) for s, (a, b) in ranges)
    assert split.stage_bytes == tuple(stage_bytes(g, s, a, b, stages, micros, schedule) for s, (a, b) in ranges)
    assert split.objective_ns == sum(split.stage_ns) + (micros - 1) * max(split.stage_ns)


@given(graphs(least=2, most=10, free=False), st.data())
def test_no_split_is_better(g: Graph, data: st.DataObject) -> None:
    n = len(g.ops)
    stages = data.draw(st.integers(1, min(n, 5)))
    micros = data.draw(st.integers(1, 8))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    tight = data.draw(st.sampled_from([None, None, 400, 800]))
    c = data.draw(clusters(stages, tight=tight))
    forced = tuple(sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=min(2, stages - 1)))))
    best = best_by_force(g, c, stages, micros, schedule, forced)
    event(f"memory {tight}, {'no split' if best is None else 'split'}")
    try:
        split = partition(g, c, stages=stages, micros=micros, schedule=schedule, forced=forced)
    except InfeasibleError:
        assert best is None
        return
    assert split.objective_ns == best
    assert set(forced) <= set(split.bounds)
    check_split(split, g, c, micros, schedule)


@given(st.lists(st.integers(0, 30), min_size=3, max_size=10), st.integers(1, 6), st.data())
def test_trade_between_slowest_stage_and_transfers_is_exact(times: list[int], micros: int, data: st.DataObject) -> None:
    """Chains with very different cuts: here the smallest sum and the smallest slowest stage disagree most."""
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=len(times), max_size=len(times)))
    text = "; ".join(
        f"v{i}:{t}/0 #{size} <- {f'v{i - 1}' if i else 'x'}"
        for i, (t, size) in enumerate(zip(times, sizes, strict=True))
    )
    g, stages = graph(text), data.draw(st.integers(2, min(4, len(times))))
    split = partition(g, cluster(stages), stages=stages, micros=micros, schedule="1f1b")
    assert split.objective_ns == best_by_force(g, cluster(stages), stages, micros, "1f1b")


def test_search_does_not_stop_a_nanosecond_early() -> None:
    """The best split is found in the last step that can still win: one less in the limit and it is lost."""
    text = "; ".join(
        f"v{i}-:{t}/0 #{size} <- {f'v{i - 1}' if i else 'x'}"
        for i, (t, size) in enumerate(zip((5, 5, 5, 3, 3, 0, 1, 3), (0, 1, 5, 5, 0, 2, 0, 2), strict=True))
    )
    split = partition(graph(text), cluster(4), stages=4, micros=3, schedule="1f1b")
    assert split.objective_ns == best_by_force(graph(text), cluster(4), 4, 3, "1f1b")


def test_equal_layers_are_cut_evenly() -> None:
    g = graph("; ".join(f"v{i}:3 <- {f'v{i - 1}' if i else 'x'}" for i in range(12)))
    assert partition(g, cluster(4), stages=4, micros=8, schedule="1f1b").bounds == (0, 3, 6, 9, 12)


def test_ties_are_broken_by_balance_even_with_one_micro_batch() -> None:
    g = graph("; ".join(f"v{i}:3 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(8)), input_bytes=0)
    assert partition(g, cluster(4), stages=4, micros=1, schedule="1f1b").bounds == (0, 2, 4, 6, 8)


def test_one_stage_holds_all() -> None:
    g = layers(2)
    split = partition(g, cluster(1), stages=1, micros=3, schedule="gpipe")
    assert split.bounds == (0, len(g.ops)) and split.objective_ns == 3 * sum(op.cost.total_ns for op in g.ops)


def test_tied_parameter_takes_room_in_each_stage() -> None:
    g = graph("a:1 +w:100 #0 <- x; b:1 +w:100 #0 <- a", input_bytes=0)
    assert partition(g, cluster(2, memory=400), stages=2, micros=1, schedule="gpipe").stage_bytes == (400, 400)


def test_activations_in_flight_decide_between_the_schedules() -> None:
    g = graph("a:1 ^100 #0 <- x; b:1 ^100 #0 <- a", input_bytes=0)
    c = cluster(2, memory=(200, 100))
    assert partition(g, c, stages=2, micros=8, schedule="1f1b").stage_bytes == (200, 100)
    with pytest.raises(InfeasibleError):
        partition(g, c, stages=2, micros=8, schedule="gpipe")


def test_infeasible_names_the_stage_and_by_how_much() -> None:
    g = graph("a:1 #0 @first <- x; b:1 +w:100 #0 @second <- a", input_bytes=0)
    with pytest.raises(InfeasibleError) as caught:
        partition(g, cluster(2, memory=350), stages=2, micros=1, schedule="gpipe")
    text = str(caught.value)
    assert "stage 1 of 2" in text and "400 bytes" in text and "50 bytes too much" in text and "second" in text
    assert "1f1b" in text


def test_state_factor_is_the_optimizers() -> None:
    g = graph("a:1 +w:100 #0 <- x", input_bytes=0)
    sizes = [partition(g, cluster(1), stages=1, micros=1, schedule="1f1b", state_factor=f).stage_bytes for f in (0, 1)]
    assert sizes == [(200,), (300,)]


def test_more_stages_than_blocks_says_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"3 stages.*2 blocks"):
        partition(graph("a <- x; b <- a"), cluster(3), stages=3, micros=1, schedule="1f1b")


def test_bytes_beyond_32_bits_do_not_overflow() -> None:
    huge = 1 << 44
    g = graph(f"a:1 #{huge} <- x; b:1 <- a")
    split = partition(g, cluster(2, memory=1 << 50), stages=2, micros=1, schedule="1f1b")
    assert split.stage_ns[1] == 3 + 2 * huge


def test_sixteen_stages_of_sixty_four_blocks_need_few_steps() -> None:
    lines = [f"v{i}:{(i * 7919) % 97} #{(i * 104729) % 89} <- {f'v{i - 1}' if i else 'x'}" for i in range(64)]
    split = partition(graph(";".join(lines)), cluster(16), stages=16, micros=4, schedule="1f1b")
    assert len(split.bounds) == 17 and split.objective_ns == sum(split.stage_ns) + 3 * max(split.stage_ns)
