"""Tests of placement on a DAG: loads against hand-computed values, the line DP and CP-SAT against enumeration."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Optimality
from benchmarks.papers.planners.exact_placement import Limits, place
from benchmarks.papers.planners.placement import (
    NEVER,
    Machine,
    Message,
    Problem,
    check,
    is_contiguous,
    loads,
    place_in_order,
    topological_orders,
)

FAST = Limits(seconds=20)


def chain(times: list[int], cost: int = 0, devices: int = 2, memory: int | None = None) -> Problem:
    n = len(times)
    edges = tuple((i, i + 1) for i in range(n - 1))
    messages = tuple(Message(cost, edge) for edge in edges) if cost else ()
    return Problem((tuple(times),), (1,) * n, messages, edges, (Machine(0, memory),) * devices)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 5))
    small = st.integers(0, 9)
    times = draw(st.lists(small, min_size=n, max_size=n))
    edges = tuple((u, v) for u in range(n) for v in range(u + 1, n) if draw(st.booleans()))
    readers = {u: [v for a, v in edges if a == u] for u in range(n)}
    messages = tuple(Message(draw(small), (u, *after)) for u, after in readers.items() if after)
    host = tuple(t * 3 if draw(st.integers(0, 4)) else None for t in times)
    machines = (Machine(0, draw(st.sampled_from([None, 3, 5]))),) * draw(st.integers(1, 3))
    machines += (Machine(1, None, pays=False),) * draw(st.integers(0, 1))
    sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    return Problem((tuple(times), host), sizes, messages, edges, machines)


def brute(problem: Problem, *, contiguous: bool) -> int:
    """Return the least maximum load over all placements, or NEVER if none is possible."""
    ways = product(range(len(problem.machines)), repeat=len(problem.sizes))
    return min(
        (max(loads(problem, where)) for where in ways if not contiguous or is_contiguous(problem, where)),
        default=NEVER,
    )


def test_a_message_costs_each_machine_that_touches_it_once() -> None:
    problem = Problem(
        times=((10, 20, 30),),
        sizes=(1, 1, 1),
        messages=(Message(5, (0, 1, 2)), Message(2, (1, 2))),
        edges=((0, 1), (0, 2), (1, 2)),
        machines=(Machine(),) * 3,
    )
    assert loads(problem, (0, 0, 0)) == (60, 0, 0)
    assert loads(problem, (0, 1, 1)) == (15, 55, 0)  # both readers on one machine: one message
    assert loads(problem, (0, 1, 2)) == (15, 27, 37)


def test_a_host_pays_no_messages_and_has_its_own_times() -> None:
    machines = (Machine(0), Machine(1, None, pays=False))
    problem = Problem(((10, 10), (100, None)), (1, 1), (Message(5, (0, 1)),), ((0, 1),), machines)
    assert loads(problem, (1, 0)) == (15, 100)
    assert loads(problem, (0, 1)) == (15, NEVER)


def test_contiguous_placements_have_no_backward_flow() -> None:
    problem = chain([1, 1, 1])
    assert is_contiguous(problem, (1, 0, 0))
    assert not is_contiguous(problem, (0, 1, 0))


def test_the_middle_of_a_chain_is_cut_where_it_balances() -> None:
    found = place_in_order(chain([1, 2, 3, 4]), (0, 1, 2, 3))
    assert found.optimality == Optimality(6, 0, 1.0, False)
    assert found.machine[0] == found.machine[2] != found.machine[3]
    assert place(chain([1, 2, 3, 4])).optimality == Optimality(6, 6, 0.0, True)


@settings(max_examples=60)
@given(problems())
def test_the_line_is_the_best_cut_of_its_order(problem: Problem) -> None:
    """Compare with every placement that is contiguous along the order, with machines in every order."""
    for order in topological_orders(check(problem)):
        line = Problem(problem.times, problem.sizes, problem.messages, tuple(pairwise(order)), problem.machines)
        best = brute(line, contiguous=True)
        if best >= NEVER:
            with pytest.raises(InfeasibleError):
                place_in_order(problem, order)
            continue
        found = place_in_order(problem, order)
        assert found.optimality.objective == best == max(loads(problem, found.machine))
        assert is_contiguous(problem, found.machine)


@settings(max_examples=40)
@given(problems(), st.booleans(), st.booleans())
def test_the_exact_placement_is_the_best_of_all(problem: Problem, contiguous: bool, hinted: bool) -> None:
    best = brute(problem, contiguous=contiguous)
    if best >= NEVER:
        with pytest.raises(InfeasibleError, match="no placement fits"):
            place(problem, contiguous=contiguous, limits=FAST)
        return
    hint = None
    if hinted:
        try:
            hint = place_in_order(problem, topological_orders(problem)[0]).machine
        except InfeasibleError:
            hint = None
    found = place(problem, contiguous=contiguous, hint=hint, limits=FAST)
    assert max(loads(problem, found.machine)) == best
    assert found.optimality == Optimality(best, best, 0.0, True)
    assert not contiguous or is_contiguous(problem, found.machine)


def test_the_placement_is_deterministic() -> None:
    problem = chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], cost=2, devices=4)
    for workers in (1, 2):
        assert len({place(problem, limits=Limits(20, workers)) for _ in range(2)}) == 1


def test_without_time_the_result_is_at_least_as_good_as_the_hint() -> None:
    problem = chain([i % 7 + 1 for i in range(120)], cost=3, devices=8)
    hint = tuple(i // 15 for i in range(120))
    found = place(problem, contiguous=False, hint=hint, limits=Limits(seconds=0.0))
    assert found.optimality.objective <= max(loads(problem, hint))
    assert 0 <= found.optimality.lower_bound <= found.optimality.objective


def test_a_hint_must_be_a_placement() -> None:
    for hint in ((0, 1, 0), (0, 0, 0)):
        with pytest.raises(UsageError, match="hint"):
            place(chain([1, 1, 1], memory=2), hint=hint)
    assert place(chain([1, 1, 1], memory=2), contiguous=False, hint=(0, 1, 0)).optimality.proved


def test_a_problem_that_fits_no_memory_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="memory"):
        place_in_order(chain([1, 1, 1], memory=1), (0, 1, 2))
    with pytest.raises(InfeasibleError, match="proved"):
        place(chain([1, 1, 1], memory=1))


def test_items_on_a_cycle_stand_together_in_every_order() -> None:
    problem = Problem(((1, 1, 1, 1),), (1,) * 4, (), ((0, 1), (1, 2), (2, 1), (2, 3)), (Machine(),) * 4)
    for order in topological_orders(problem):
        assert abs(order.index(1) - order.index(2)) == 1
    assert place(problem).optimality.objective == 2  # 1 and 2 share a machine


@pytest.mark.parametrize(
    "broken",
    [
        Problem(((1,),), (1, 1), (), (), (Machine(),)),
        Problem(((1,),), (1,), (Message(1, (0, 1)),), (), (Machine(),)),
        Problem(((-1,),), (1,), (), (), (Machine(),)),
        Problem(((1,),), (1,), (), (), (Machine(1),)),
        Problem(((1,),), (1,), (), (), ()),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(broken: Problem) -> None:
    with pytest.raises(UsageError):
        place(broken)
