"""No plan of a space may be faster than its bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from random import Random

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from support.grids import sampled
from support.languages.graphs import cluster, graph
from support.oracles.drawn_clusters import drawn, found_for
from support.oracles.planner_oracle import Kind, Problem, candidates, planned, problem, problems

from autopart.passes.proof.lower_bound import _bound, _chain_bound, _most_work, lower_bound
from autopart.passes.proof.sets import rows_needed
from autopart.passes.search.evaluation import evaluate
from autopart.passes.search.space import PlanRequest


def check(p: Problem, random: Random, count: int) -> float:
    """The bound against random plans that fit; how close the fastest of them comes."""
    space = p.space
    bound = lower_bound(space)
    pool = list(islice(candidates(space), 20_000))
    plans = [evaluate(space, candidate) for candidate in random.sample(pool, min(count, len(pool)))]
    least = min([plan.step_ns for plan in plans if plan.fits], default=0)
    assert bound <= least or not any(plan.fits for plan in plans), f"{bound} > {least}"
    return bound / least if least else 1.0


@settings(max_examples=50)
@given(problems(Kind(most=7)), st.randoms(use_true_random=True))
def test_no_random_plan_is_faster_than_the_bound(p: Problem, random: Random) -> None:
    event(f"{check(p, random, 25):.1f} of the fastest seen")


def with_a_wish(p: Problem, random: Random) -> Problem:
    """Stages, or replicas, or both as in one of the plans of the problem."""
    one = random.choice(list(islice(candidates(p.space), 5_000)))
    alike = len(set(one.widths)) == 1
    replicas = one.widths[0] if alike and random.random() < 0.5 else one.widths
    wishes = [{"stages": one.stages}, {"stages": one.stages, "replicas": replicas}]
    wishes += [{"replicas": replicas}] if isinstance(replicas, int) else []
    return replace(p, request=replace(p.request, **random.choice(wishes)))  # type: ignore[arg-type]


@settings(max_examples=50)
@given(problems(Kind(most=7)), st.randoms(use_true_random=True))
def test_no_random_plan_of_a_wish_is_faster_than_its_bound(p: Problem, random: Random) -> None:
    event(f"{check(with_a_wish(p, random), random, 25):.1f} of the fastest seen")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_no_plan_of_a_thousand_problems_is_faster_than_the_bound(part: int) -> None:
    for i in range(250):
        random = Random(250 * part + i)
        p = problem(random, Kind(chain=i % 4 > 0))
        check(p, random, 200)
        check(with_a_wish(p, random), random, 100)


def bound_of(text: str, world: int, rows: tuple[int, ...], **request: object) -> int:
    g = graph(text, input_bytes=0)
    options = PlanRequest((rows,), **request)  # type: ignore[arg-type]
    return lower_bound(Problem(g, cluster(world, latency_ns=50), options).space)


def test_message_without_bytes_has_no_latency() -> None:
    """The simulator sends nothing then, so the bound must not charge for it either."""
    assert bound_of("a:10/0 #0 <- x; b:10/0 #0 <- a", 2, (1, 1), replicas=1) <= 30


def test_work_is_shared_by_all_devices_at_best() -> None:
    assert bound_of("a:100/100 #0 <- x", 1, (1, 1, 1)) == 600
    assert bound_of("a:100/100 #0 <- x", 4, (1,) * 4, replicas=1) == 800
    assert bound_of("a:100/100 #0 <- x", 4, (4,)) == 200


@given(st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=3), st.data())
def test_work_is_bounded_as_by_the_best_division_of_each_block(times: list[list[int]], data: st.DataObject) -> None:
    """Unlike devices: a linear program divides every block freely; by duality no weights of types give more."""
    counts = data.draw(st.lists(st.integers(1, 3), min_size=len(times), max_size=len(times)))
    bound = _most_work(np.array(times, float), np.array(counts), sum(counts))
    every = cp_model.CpModel()
    parts = 2_000  # a division in whole thousandths is no better than the best
    share = [[every.new_int_var(0, parts, "") for _ in block] for block in times]
    for block in range(3):
        every.add(sum(own[block] for own in share) == parts)
    longest = every.new_int_var(0, 3 * 50 * parts, "")
    for own, taken, count in zip(share, times, counts, strict=True):
        every.add(sum(x * t for x, t in zip(own, taken, strict=True)) <= count * longest)
    every.minimize(longest)
    solver = cp_model.CpSolver()
    assert solver.solve(every) == cp_model.OPTIMAL
    best = solver.objective_value / parts
    assert bound <= best * (1 + 1e-9)
    assert bound >= 0.8 * best - 0.05


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 3), st.data())
def test_of_all_whole_shares_each_has_a_type_with_the_rows_that_are_needed(times: list[int], more: int, data) -> None:
    counts = tuple(data.draw(st.lists(st.integers(0, 2), min_size=len(times), max_size=len(times)).filter(any)))
    rows, kinds = sum(counts) + more, [kind for kind, count in enumerate(counts) for _ in range(count)]
    needed = rows_needed(counts, [float(time) for time in times], rows)
    longest = []
    for shares in product(range(1, rows + 1), repeat=len(kinds)):
        if sum(shares) == rows:
            assert any(
                kind == own and has >= least for own, least in needed for kind, has in zip(kinds, shares, strict=True)
            )
            longest.append(max(times[kind] * has for kind, has in zip(kinds, shares, strict=True)))
    assert min(times[kind] * least for kind, least in needed) == min(longest)


def test_a_slow_device_has_a_whole_row() -> None:
    """16 rows on two devices and six of a sixth of their speed: no 0.9 rows."""
    assert rows_needed((2, 6), [1.0, 6.0], 16) == [(1, 1)]
    assert rows_needed((2, 6), [1.0, 6.0], 32) == [(0, 12), (1, 2)]


def test_unlike_devices_share_work_by_their_rates() -> None:
    assert _most_work(np.array([[8.0, 8.0], [2.0, 2.0]]), np.array([4, 1]), 5) == pytest.approx(16 / (4 + 4))
    assert _most_work(np.array([[8.0, 8.0], [2.0, 2.0]]), np.array([4, 1]), 1) == pytest.approx(4)


def test_devices_that_the_request_leaves_idle_do_no_work() -> None:
    text = "; ".join(f"v{i}:100/100 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(4))
    whole = 8 * 800  # of 8 rows; a micro-batch of 8 rows takes 8 times as long as one of a row
    assert bound_of(text, 8, (8,)) == whole // 8
    assert bound_of(text, 8, (8,), replicas=2) == whole // 2  # one micro-batch meets one stage after the other
    assert bound_of(text, 8, (8,) * 9, stages=2, replicas=1) == 9 * whole // 2 + whole // 2
    assert bound_of(text, 8, (8,) * 99, stages=2, replicas=(2, 1)) >= 99 * whole // 3
    assert bound_of(text, 8, (1,) * 99, stages=2) >= 99 * 800 // 2


def test_equal_layers_without_messages_are_proved_optimal() -> None:
    text = "; ".join(f"v{i}:3 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(8))
    assert bound_of(text, 4, (1,) * 8, replicas=1) == 2 * 9 * (8 + 3)


@pytest.mark.parametrize("seed", sampled(range(80), every=16))
def test_no_plan_that_is_found_is_faster_than_the_bound_at_any_prices(seed: int) -> None:
    """GPUs whose plans trade sums of gradients, memory and bubbles, under all orders; each way to cut the batch."""
    problem = drawn(seed, devices=4, layers=5)
    found, space = found_for(problem), problem.space
    fastest: dict[tuple[tuple[int, ...], bool, bool], int] = {}
    for evaluation in found.ranked:
        plan = evaluation.candidate
        key = plan.micro_rows, bool(plan.other_order), plan.per_rank > 1
        fastest.setdefault(key, evaluation.step_ns)
    for (rows, orders, several), step_ns in fastest.items():
        assert _bound(space, 0, rows, orders) <= step_ns
        assert several or _chain_bound(space, rows, orders) <= step_ns
    assert lower_bound(space, orders=True) <= found.best_ns or not found.fitting


def test_plans_of_one_micro_batch_pay_for_sums_or_for_the_path() -> None:
    """One micro-batch on four devices: all replicas sum all gradients, else it passes one device after the other."""
    text = "; ".join(f"v{i}:1000000/2000000 #64 +w{i}:4000000 @l.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(4))
    slow = cluster(4, bytes_per_s=10**9)
    problem = Problem(graph(text), slow, PlanRequest(((4,),)))
    work = 12 * 1_000_000
    bound = lower_bound(problem.space, orders=True)
    assert 1.5 * work < bound <= planned(problem).step_ns  # type: ignore[union-attr]


@pytest.mark.parametrize("memory", [8_500_000, 20_000_000, 30_000_000])
def test_a_product_that_need_not_run_again_costs_no_plan_a_second_forward(memory: int) -> None:
    """Of a product only the operands are kept, so that recomputing it alone frees memory for nothing."""
    text = "; ".join(f"v{i}:1000/2000 #64 ^4000000 +w{i}:64 @l.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(4))
    layers = graph(text)
    products = replace(layers, ops=tuple(replace(op, target="aten.mm.default") for op in layers.ops))
    work, steps = 2 * 4 * 2 * 3000, []
    for model in (layers, products):
        problem = Problem(model, cluster(1, memory=memory), PlanRequest(((2, 2),)))
        plan = planned(problem)
        assert plan is not None and lower_bound(problem.space) <= plan.step_ns and plan.stages[0].recompute
        steps.append(plan.step_ns)
    assert steps[0] > steps[1] and steps[1] < work + 1000
