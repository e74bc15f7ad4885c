"""Other orders for the best plans so far: split backwards, several stages a rank, and orders that are searched.

The dynamic programs of the search stand for 1F1B's family.  What another order gains depends on the bubble that is left
and on memory, not on where exactly the cuts are, so the best plans of different shapes are tried under every other
schedule (`Way`), those with several stages a rank with cuts made anew (`even_cuts`), and each is simulated within
memory like every candidate.  The searched order, which takes longest to find, is tried last and for the few best.

Where the planner may choose, an order has to save enough to be worth it: see `candidate.preference`, and `_worth`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from autopart.passes.program.orders import LOOP, ONE, V, placed
from autopart.passes.program.schedules import find, takes_slices
from autopart.passes.search.candidate import Candidate
from autopart.passes.search.evaluation import Evaluation, Search
from autopart.passes.search.even_cuts import even_bounds, levelled, shortest_bounds
from autopart.passes.search.refinement import actions_of
from autopart.passes.search.space import ORDERS, SEARCHED, PlanRequest, SearchSpace

SHAPES = 4
"""Plans of different shapes that are tried under other orders."""
BEST_SEARCHED = 2
"""Plans for which orders are searched."""
EFFORT = 1_500_000
"""Actions that may be simulated to compare orders."""
LITTLE = 0.03
"""A plan that leaves less of a step idle is not tried under other orders."""
COMPUTE_NS = {"cpu": 300_000, "cuda": 30_000}
"""Nanoseconds that each further compute of a rank must save: to begin one, and its messages, is left out by the
simulation.  An order of magnitude."""


class Way(NamedTuple):
    """A schedule, the stages of each rank, and their placement."""

    schedule: str
    per_rank: int
    placement: str


def ways(request: PlanRequest) -> list[Way]:
    """Return the orders beside 1F1B's family that a request allows; () for a schedule of that family, or of a user."""
    if request.schedule not in ("auto", *ORDERS) or (request.schedule == "auto" and request.prove_seconds > 0):
        return []
    names = ORDERS if request.schedule == "auto" else (request.schedule,)
    numbers, found = request.numbers_per_rank, []
    for name in names:
        for placement in (ONE, V, LOOP) if name == SEARCHED else (find(name).placement,):
            found += [Way(name, number, placement) for number in numbers if _goes(name, number, placement)]
    return found


def _goes(name: str, per_rank: int, placement: str) -> bool:
    """Return whether a schedule has an order for so many stages a rank."""
    if name == "zb-v":
        return per_rank == 2
    return (per_rank == 1) == (placement == ONE)


def evaluate_orders(search: Search, fine: SearchSpace) -> None:
    """Evaluate the best plans under the other orders that the request allows, and leave out what it does not.

    fine: the space of many blocks, whose request may name several stages a rank.
    """
    request = fine.request
    allowed = ways(request)
    if not allowed:
        return
    effort = EFFORT
    shapes = [found for found in search.finalists(SHAPES) if found.stages > 1 or not request.is_free]
    tried: list[Evaluation] = []
    for found in shapes:
        if request.is_free and _idle(found) < LITTLE:
            continue
        for way in allowed:
            for candidate in _under(way, found, fine) if way.schedule != SEARCHED else ():
                if effort > 0 or not tried:
                    tried.append(search.evaluate(fine if way.per_rank > 1 else found.space, candidate))
                    effort -= actions_of(candidate)
        search.tell("other orders")
    search.keep(lambda candidate: _allows(request, candidate))


def with_one_per_rank(space: SearchSpace) -> SearchSpace:
    """Return the space of the plans that other orders are tried on: one stage a rank, cut wherever that is best."""
    request = space.request.with_one_per_rank()
    return space if request is space.request else replace(space, request=request, forced=())


def _allows(request: PlanRequest, candidate: Candidate) -> bool:
    """Return whether the request allows the schedule and the stages a rank of a candidate."""
    return request.schedule in ("auto", candidate.schedule) and candidate.per_rank in request.numbers_per_rank


def _idle(found: Evaluation) -> float:
    """Return the share of the step in which the busiest rank is idle."""
    micros = len(found.candidate.micro_rows)
    busy = micros * max(e.fwd_ns + e.bwd_ns for e in found.estimates)
    return 1 - busy / max(1, found.step_ns)


def _under(way: Way, found: Evaluation, fine: SearchSpace) -> Iterator[Candidate]:
    """Yield the plan under another order; with several stages a rank once for each kind of cuts."""
    slices = found.candidate.token_slices
    if slices and not takes_slices(find(way.schedule)):
        return
    plan = replace(found.candidate, schedule=way.schedule, per_rank=way.per_rank, placement=way.placement)
    if way.per_rank == 1:
        yield plan
        return
    stages, rows = plan.stages, max(plan.micro_rows)
    if stages > fine.chain.n or len(set(plan.widths)) > 1:
        return
    homes = placed(way.placement, stages, len(plan.widths))
    found_bounds = [even_bounds(fine, rows, (1,) * stages), shortest_bounds(fine, rows, stages)]
    level = [
        levelled(fine, rows, bounds, homes) for bounds in found_bounds if bounds is not None and fine.allows(bounds)
    ]
    for bounds in dict.fromkeys(level):
        yield replace(plan, bounds=bounds)
