"""The certificate of a pipeline: against every pipeline, against schedules, and within its time."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopart.passes.proof.certificate import PipelineModel, lower_bound_ns
from autopart.passes.proof.exact import certify

FAST = 20.0


def line(
    times: list[int], edges: list[tuple[int, int]], spots: int, micros: int = 4, memory: int = 1 << 40, **more: object
) -> PipelineModel:
    """Equal positions; every item has one byte, and keeps nothing."""
    n = len(times)
    equal = PipelineModel(
        times=(tuple(times),) * spots,
        edges=tuple(edges),
        micros=micros,
        static_bytes=(1,) * n,
        live_bytes=((0,) * n,) * spots,
        live=(1,) * spots,
        memory_bytes=(memory,) * spots,
    )
    return replace(equal, **more)  # type: ignore[arg-type]


def chain(n: int) -> list[tuple[int, int]]:
    return [(v, v + 1) for v in range(n - 1)]


@st.composite
def lines(draw: st.DrawFn) -> PipelineModel:
    n, spots = draw(st.integers(1, 7)), draw(st.integers(1, 3))

    def row(most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(0, most), min_size=n, max_size=n)))

    edges = tuple((u, v) for u in range(n) for v in range(u + 1, n) if draw(st.integers(0, 2)) == 0 or v == u + 1)
    if draw(st.booleans()):
        edges = tuple(e for e in edges if draw(st.booleans()))
    one = row(9)
    same = draw(st.booleans())
    return PipelineModel(
        times=tuple(one if same else row(9) for _ in range(spots)),
        edges=edges,
        micros=draw(st.integers(1, 5)),
        static_bytes=row(3),
        live_bytes=tuple(row(2) for _ in range(spots)),
        live=tuple(draw(st.integers(1, 3)) for _ in range(spots)),
        memory_bytes=tuple(draw(st.sampled_from([6, 12, 99])) for _ in range(spots)),
        forward_only=tuple(e for e in edges if draw(st.integers(0, 5)) == 0),
    )


def pipelines(problem: PipelineModel) -> list[tuple[int, ...]]:
    """Every way to place the items that is a pipeline and fits."""
    spots, n = len(problem.times), len(problem.static_bytes)
    found = []
    for where in product(range(spots), repeat=n):
        own = [[v for v in range(n) if where[v] == q] for q in range(spots)]
        need = [sum(problem.need_bytes(q, v) for v in own[q]) for q in range(spots)]
        forward = all(where[u] <= where[v] for u, v in problem.edges)
        if all(own) and forward and all(a <= b for a, b in zip(need, problem.memory_bytes, strict=True)):
            found.append(where)
    return found


@settings(max_examples=150)
@given(lines())
def test_the_certificate_is_the_least_of_all_pipelines(problem: PipelineModel) -> None:
    ways = pipelines(problem)
    assume(ways)
    position, found = certify(problem, ways[0], FAST)
    assert found.proved
    assert found.objective == lower_bound_ns(problem, position) == min(lower_bound_ns(problem, w) for w in ways)
    assert certify(problem, ways[-1], FAST)[1] == found
    early, bound = certify(problem, ways[-1], 0.0)
    assert early == ways[-1] and bound.lower_bound <= found.objective


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 6))
def test_on_a_chain_all_positions_before_count(times: list[int], spots: int, micros: int) -> None:
    problem = line(times, chain(len(times)), min(spots, len(times)), micros)

    def written_out(where: tuple[int, ...]) -> int:
        took = [sum(t for t, at in zip(times, where, strict=True) if at == q) for q in range(len(problem.times))]
        return max(sum(took[:q]) + micros * took[q] for q in range(len(took)))

    ways = pipelines(problem)
    assert certify(problem, ways[0], FAST)[1].objective == min(map(written_out, ways))


def played(problem: PipelineModel, where: tuple[int, ...], rng: Random) -> int:
    """Time of one step under a random schedule that never idles a position without need; forwards take a share."""
    spots, micros = range(len(problem.times)), range(problem.micros)
    whole = [sum(problem.times[q][v] for v, at in enumerate(where) if at == q) for q in spots]
    forward = [rng.randint(0, t) for t in whole]
    apart = [(u, v) for u, v in problem.edges if where[u] != where[v]]
    needs: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for q, m in product(spots, micros):
        needs["F", q, m] = {("F", where[u], m) for u, v in apart if where[v] == q}
        back = {("B", where[v], m) for u, v in apart if where[u] == q and (u, v) not in problem.forward_only}
        needs["B", q, m] = back | {("F", q, m)}
    done: dict[tuple[str, int, int], int] = {}
    free = [0] * len(spots)
    while len(done) < len(needs):
        ready = [a for a, before in needs.items() if a not in done and before <= done.keys()]
        start = {a: max([free[a[1]], *(done[b] for b in needs[a])]) for a in ready}
        action = rng.choice([a for a in ready if start[a] == min(start.values())])
        kind, q, _ = action
        free[q] = done[action] = start[action] + (forward[q] if kind == "F" else whole[q] - forward[q])
    return max(free)


@settings(max_examples=150)
@given(lines(), st.randoms(use_true_random=False))
def test_no_schedule_is_shorter(problem: PipelineModel, rng: Random) -> None:
    for where in rng.sample(ways, min(5, len(ways))) if (ways := pipelines(problem)) else ():
        assert played(problem, where, rng) >= lower_bound_ns(problem, where)


def test_branches_may_run_beside_each_other() -> None:
    """Two items that do not know each other, and one that reads both: the first two start at once."""
    problem = line([10, 10, 1], [(0, 2), (1, 2)], 3, micros=1)
    assert lower_bound_ns(problem, (0, 1, 2)) == 11
    assert lower_bound_ns(line([10, 10, 1], chain(3), 3, micros=1), (0, 1, 2)) == 21
    assert played(problem, (0, 1, 2), Random(0)) == 11


def test_an_edge_without_gradient_orders_and_no_more() -> None:
    problem = line([5, 5], [(0, 1)], 2, micros=1, forward_only=((0, 1),))
    assert lower_bound_ns(problem, (0, 1)) == 5


def test_times_beyond_the_integers_of_the_solver_are_rounded_down() -> None:
    problem = line([10**18 + 1, 10**18 + 2, 10**18], chain(3), 2, micros=8)
    _, found = certify(problem, (0, 1, 1), FAST)
    assert found.objective == min(lower_bound_ns(problem, w) for w in pipelines(problem))
    assert found.objective * (1 - 1e-12) < found.lower_bound <= found.objective


def test_the_answer_is_the_same_every_time() -> None:
    rng = Random(3)
    problem = line([rng.randint(1, 50) for _ in range(20)], chain(20), 4)
    assert len({certify(problem, [v // 5 for v in range(20)], 30.0) for _ in range(2)}) == 1


def test_it_stops_in_time() -> None:
    """200 items that are no chain on 16 positions of unequal speed; the slack is for a busy machine."""
    rng = Random(0)
    n, spots = 200, 16
    times = [rng.randrange(10**5, 10**7) for _ in range(n)]
    edges = [(v - d, v) for v in range(1, n) for d in {1, rng.randint(1, 9)} if v >= d and rng.random() < 0.9]
    equal = line(times, edges, spots, micros=32)
    problem = replace(equal, times=tuple(tuple(t * (q + 9) for t in times) for q in range(spots)))
    hint = tuple(v * spots // n for v in range(n))
    start = time.monotonic()
    _, found = certify(problem, hint, 1.0)
    assert time.monotonic() - start < 4
    assert 0.1 * found.objective < found.lower_bound <= found.objective <= lower_bound_ns(problem, hint)
