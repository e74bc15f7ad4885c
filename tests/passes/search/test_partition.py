"""The partition against every partition there is, computed from the definition of U."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from autopart.passes.search.partition import (
    INFEASIBLE,
    Partition,
    Table,
    TableOf,
    Taken,
    by_length,
    solve_partition,
    solve_pools,
)


def tables(seed: int, n: int, far: float) -> TableOf:
    """Random own and through for every place, width and range; a share of them cannot be."""
    known: dict[tuple[int, int, int], Table | None] = {}

    def table_of(k: int, width: int, used: int) -> Table | None:
        if (k, width, used) not in known:
            draw = random.Random(f"{seed} {k} {width} {used}")
            own, through = (np.full((n + 1, n + 1), INFEASIBLE, dtype=np.int64) for _ in range(2))
            for a, b in combinations(range(n + 1), 2):
                if draw.random() >= far:
                    own[a, b - a], through[a, b - a] = draw.randint(0, 30), draw.randint(0, 9)
            known[k, width, used] = None if draw.random() < far else (own, through)
        return known[k, width, used]

    return table_of


def every(n: int, stages: int, used: int, widths: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for inner in combinations(range(1, n), stages - 1):
        for chosen in product(widths, repeat=stages):
            if sum(chosen) == used:
                yield (0, *inner, n), chosen


def value(bounds: tuple[int, ...], widths: tuple[int, ...], table_of: TableOf) -> int:
    """U as the docstring of the module says it; INFEASIBLE when a stage cannot be."""
    reached, u = 0, 0
    for s, (a, b) in enumerate(pairwise(bounds)):
        table = table_of(len(widths) - s, widths[s], sum(widths[s:]))
        if table is None or table[0][a, b - a] >= INFEASIBLE:
            return INFEASIBLE
        u = max(u, reached + int(table[0][a, b - a]))
        reached += int(table[1][a, b - a])
    return max(u, reached)


def check_partitions(n: int, depth: int, widths: tuple[int, ...], most: int, table_of: TableOf) -> list[Partition]:
    found = solve_partition(n, depth, widths, most, table_of)
    known = {(len(p.widths), sum(p.widths)): p for p in found}
    assert len(known) == len(found)
    for stages in range(1, n + 2):
        for used in range(1, depth + 2):
            ways = every(n, stages, used, widths)
            best = min((value(*way, table_of) for way in ways), default=INFEASIBLE) if used <= depth else INFEASIBLE
            if stages > most or best >= INFEASIBLE:
                assert (stages, used) not in known
                continue
            partition = known[stages, used]
            assert partition.latency_ns == best == value(partition.bounds, partition.widths, table_of)
            assert set(partition.widths) <= set(widths)
    return found


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([(1,), (1, 2), (2, 3), (1, 2, 3, 4, 5)]),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.2, 0.6]),
)
def test_no_division_is_better(seed: int, n: int, depth: int, widths: tuple[int, ...], most: int, far: float) -> None:
    found = check_partitions(n, depth, widths, most, tables(seed, n, far))
    event("some" if found else "none")


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(0, 2)), st.booleans())
def test_no_division_of_unlike_devices_is_better_in_any_order(seed: int, n: int, counts: Taken, wide: bool) -> None:
    """Every sequence of stages that take some devices of each of two kinds, against the one that is found."""
    every_width = [
        (a, b) for a, b in product(range(counts[0] + 1), range(counts[1] + 1)) if a + b and (wide or a + b < 2)
    ]
    plain = tables(seed, n, 0.1)

    def table_of(k: int, width: Taken, used: Taken) -> Table | None:
        return plain(k, 10 * width[0] + width[1], 10 * used[0] + used[1])

    best: dict[tuple[int, Taken], int] = {}
    for stages in range(1, n + 1):
        for taken in product(every_width, repeat=stages):
            used = tuple(map(sum, zip(*taken, strict=True)))
            if any(u > c for u, c in zip(used, counts, strict=True)):
                continue
            flat = [10 * a + b for a, b in taken]
            for inner in combinations(range(1, n), stages - 1):
                found = value((0, *inner, n), tuple(flat), plain)
                best[stages, used] = min(found, best.get((stages, used), INFEASIBLE))
    cuts = solve_pools(n, counts, every_width, n, table_of, idle=[(0, 0)])
    known = {(len(cut.taken), cut.used): cut.latency_ns for cut in cuts}
    assert known == {way: least for way, least in best.items() if least < INFEASIBLE}
    for cut in cuts:
        assert value(cut.bounds, tuple([10 * a + b for a, b in cut.taken]), plain) == cut.latency_ns
        assert cut.used == tuple(map(sum, zip(*cut.taken, strict=True)))


def chain(times: list[int], micros: int, arriving: list[int]) -> TableOf:
    """Blocks of these times, and a cut before block i that costs arriving[i] for each micro-batch; any place alike."""
    sums = np.concatenate([[0], np.cumsum(times)])
    own = np.where(np.tri(len(sums), k=0, dtype=bool), INFEASIBLE, micros * (sums[None, :] - sums[:, None]))
    into = np.array([0, *arriving[1:], 0])[:, None]
    through = np.where(own < INFEASIBLE, (sums[None, :] - sums[:, None]) + into, INFEASIBLE)
    past = np.arange(len(sums))[:, None] + np.arange(len(sums))[None, :] >= len(sums)
    own, through = (np.where(past, INFEASIBLE, by_length(matrix, len(times))) for matrix in (own, through))
    return lambda k, width, used: (own, through)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=9), st.integers(1, 6), st.data())
def test_trade_between_slowest_stage_and_transfers_is_exact(times: list[int], micros: int, data: st.DataObject) -> None:
    """Chains with very different cuts: here the smallest way through and the smallest slowest stage disagree most."""
    arriving = data.draw(st.lists(st.integers(0, 60), min_size=len(times), max_size=len(times)))
    check_partitions(len(times), 4, (1,), 4, chain(times, micros, arriving))


def test_one_stage_holds_all() -> None:
    assert solve_partition(3, 1, (1,), 1, chain([5, 6, 7], 4, [0, 0, 0])) == [Partition((0, 3), (1,), 4 * 18)]


def test_of_equal_divisions_the_first_cut_is_taken() -> None:
    """The same answer everywhere: ties are broken by place, never by chance."""
    found = solve_partition(4, 2, (1,), 2, chain([0, 0, 0, 0], 1, [0, 0, 0, 0]))
    assert [d.bounds for d in found] == [(0, 4), (0, 1, 4)]


def test_what_cannot_be_is_never_taken() -> None:
    assert solve_partition(4, 4, (1, 2), 4, lambda k, width, used: None) == []
    assert all(set(d.widths) == {2} for d in solve_partition(4, 4, (2,), 4, chain([1] * 4, 1, [0] * 4)))


def test_times_beyond_32_bits_do_not_overflow() -> None:
    huge = 1 << 44
    found = solve_partition(2, 2, (1,), 2, chain([1, 1], 1, [0, huge]))
    assert [d.latency_ns for d in found] == [2, 2 + huge]


def test_sixteen_stages_of_sixty_four_blocks_are_found() -> None:
    times, arriving = ([(i * prime) % 97 for i in range(64)] for prime in (7919, 104729))
    table_of = chain(times, 8, arriving)
    found = solve_partition(64, 16, (1,), 16, table_of)
    assert [len(d.widths) for d in found] == list(range(1, 17))
    assert all(d.latency_ns == value(d.bounds, d.widths, table_of) for d in found)


def test_stages_that_wait_for_micro_batches_to_come_back_are_cut_evenly() -> None:
    """Eight micro-batches through four stages: without waiting, the first stage may be the slow one for nothing."""
    times, micros = [3, 3, 1, 2, 1, 2, 1, 2, 1], 8
    sums = np.concatenate([[0], np.cumsum(times)])

    def with_turns(k: int, width: int, used: int) -> Table:
        busy, latency = chain(times, micros, [0] * 9)(k, width, used)[:2]
        ends = np.minimum(np.arange(10)[:, None] + np.arange(10)[None, :], 9)
        return busy, latency, (micros - k - 1) * (sums[ends] - sums[:, None])

    plain, waiting = (
        solve_partition(9, 4, (1,), 4, table)[-1] for table in (chain(times, micros, [0] * 9), with_turns)
    )

    def slowest(partition: Partition) -> int:
        return max(sums[b] - sums[a] for a, b in pairwise(partition.bounds))

    assert slowest(waiting) <= slowest(plain)
    assert waiting.latency_ns >= plain.latency_ns
