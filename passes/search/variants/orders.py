"""Other orders for the best plans so far: split backwards, several stages a rank, and orders that are searched.

The dynamic programs of the search stand for 1F1B's family.  What another order gains depends on the bubble that is left
and on memory, not on where exactly the cuts are, so the best plans of different shapes are tried under every other
schedule (`Way`), those with several stages a rank with cuts made again (`levelled`), and each is simulated within
memory like every candidate.  The searched order, which takes longest to find, is tried last and for the few best.

A plan whose order is searched gets one for each of a few ways to run it (`ordered`), found on a shorter step where that
is long; the best gets an order of the whole step.

Where the planner may choose, an order has to save enough to be worth it (`Candidate.preference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from autopart.ir.cluster import DEVICE_KINDS
from autopart.passes.program.named import FAMILY, SEARCHED
from autopart.passes.program.orders import LOOP, ONE, V, placed
from autopart.passes.program.schedules import find
from autopart.passes.search.evaluation import Candidate, Evaluation, Search
from autopart.passes.search.refinement import (
    actions_of,
    even_bounds,
    levelled,
    refined,
    shortest_bounds,
    speeds_of,
    with_even_cuts,
)
from autopart.passes.search.space import ORDERS, PER_RANK, PlanRequest, SearchSpace, blocks_of, is_other
from autopart.passes.search.variants.ordered import Ordered, shortest_way, with_order

SHAPES = 4
"""Plans of different shapes that are tried under other orders; of short programs twice as many, as many of those that
are best under plain 1F1B, and as many that differ in where unlike devices stand: what suits 1F1B's family may need
memory where another order has none."""
SMALL = 20_000
"""Actions of a step up to which every order is compared, also those that cannot win, to report what they take."""
MOVES = 100_000
"""Computes that may be replayed to make one searched order shorter."""
PER_STAGE, MOST_BLOCKS = 8, 1024
"""Blocks per stage, and the most, from which stages of ranks with two of them are made: with fewer the loads of ranks
differ by more than the bubble that is saved (GPT-3 on 48 ranks with 4 blocks a stage: by 15 %)."""
LITTLE = 0.03
"""A plan of which less is idle is not tried under other orders, where the planner may choose."""

NEAR = 1.1
"""How far above the preferred plan the best one under another order may be to be refined."""


class Way(NamedTuple):
    """A schedule, the stages of each rank, and their placement."""

    schedule: str
    per_rank: int
    placement: str


def ways(request: PlanRequest) -> list[Way]:
    """Return the orders outside 1F1B's family that a request allows; () for a schedule of that family, or of a user."""
    stays = request.is_free and (request.prove_seconds > 0 or not request.orders)  # certificates are for the family
    if not (request.schedule == "auto" or is_other(request.schedule)) or stays or request.policy == "turn":
        return []
    names = ORDERS if request.schedule == "auto" else (request.schedule,)
    numbers, found = request.numbers_per_rank, []
    for name in names:
        for placement in (ONE, V, LOOP) if name == SEARCHED else (find(name).placement,):
            for number in numbers:
                if number == 2 if name == "zb-v" else (number == 1) == (placement == ONE):
                    found.append(Way(name, number, placement))
    return found


def _trials(search: Search, *, by_kind: bool) -> Iterator[tuple[Way, Evaluation, SearchSpace]]:
    """Yield the orders that the request allows, each with a plan that it may shorten, and the space to cut again.

    by_kind: also plans that differ in where unlike devices stand.
    """
    fine, allowed = search.asked, ways(search.asked.request)
    best = search.finalists(SHAPES) if allowed else []
    if best and actions_of(best[0].candidate) <= SMALL:
        best = [*search.finalists(2 * SHAPES), *search.finalists(2 * SHAPES, schedule=FAMILY[0])]
        best += search.finalists(2 * SHAPES, by_kind=True) if by_kind and len(fine.costs.device_types) > 1 else []
    different = {(found.candidate.bounds, found.candidate.ranks, found.candidate.micro_rows): found for found in best}
    shapes = [found for found in different.values() if may_gain(found, fine)]
    search.other_orders |= bool(shapes)
    fine = with_enough_blocks(fine, max([len(found.candidate.widths) for found in shapes], default=0))
    for found in shapes:
        for way in promising(allowed, found, search, fine):
            yield way, found, fine


def may_gain(found: Evaluation, fine: SearchSpace) -> bool:
    """Return whether a plan leaves enough of its step idle for another order to be worth it, or to be asked for.

    Several stages a rank also even out what ranks have to do."""
    if not fine.request.is_free:
        return True
    micros = len(found.candidate.micro_rows)
    idle_ns = found.step_ns - micros * (
        _even_ns(found) if max(fine.request.numbers_per_rank) > 1 else _longest_ns(found)
    )
    least_ns = micros * DEVICE_KINDS[fine.costs.cluster.kind].compute_ns
    return found.stages > 1 and idle_ns > max(least_ns, LITTLE * found.step_ns)


def _longest_ns(found: Evaluation) -> float:
    """Return the time of a micro-batch on the position that takes longest."""
    return max(e.fwd_ns + e.bwd_ns for e in found.estimates)


def _even_ns(found: Evaluation) -> float:
    """Return the time of a micro-batch on every position if all took equally long."""
    widths = found.candidate.widths
    return sum([width * (e.fwd_ns + e.bwd_ns) for width, e in zip(widths, found.estimates, strict=True)]) / sum(widths)


def evaluate_named(search: Search, effort: int) -> None:
    """Evaluate the best plans under the other named orders that the request allows."""
    for way, found, fine in _trials(search, by_kind=not search.asked.request.is_free):
        actions = actions_of(under_order(way, found))
        if way.schedule == SEARCHED or (actions > effort and search.fitting):
            continue
        for candidate in under(way, found, fine):
            effort -= actions
            search.evaluate(fine if candidate.per_rank > 1 else found.space, candidate)
        search.tell("other orders")


def under_order(way: Way, found: Evaluation) -> Candidate:
    """Return the plan under another order, with cuts for one stage a rank."""
    return replace(found.candidate, schedule=way.schedule, per_rank=way.per_rank, placement=way.placement)


def evaluate_searched(search: Search, effort: int) -> None:
    """Evaluate the plan whose listed order is shortest, with an order searched for it.

    effort: computes of the plans for which orders are listed.
    """
    known: set[object] = set()
    best: tuple[SearchSpace, Candidate, Ordered] | None = None
    for way, found, fine in _trials(search, by_kind=True):
        computes = 3 * under_order(way, found).stages * len(found.candidate.micro_rows)
        if way.schedule != SEARCHED or (computes > effort and known):
            continue
        for candidate in under(way, found, fine):
            effort -= computes
            space = fine if candidate.per_rank > 1 else found.space
            key = space.chain.n, candidate.key, found.decision.zero
            if key in known:  # plans that differ in their cuts alone may be cut alike
                continue
            known.add(key)
            limit = min(_to_beat(search, fine, candidate), best[2].step_ns if best else math.inf)
            listed_way = shortest_way(space, candidate, found.decision.zero, limit)
            if listed_way is not None and (best is None or listed_way.step_ns < best[2].step_ns):
                best = space, candidate, listed_way
        search.tell("listed orders")
    if best is not None:
        search.evaluate(best[0], with_order(*best, MOVES))
        search.tell("searched orders")


def refine_ordered(search: Search, effort: int) -> None:
    """Move cuts, devices and rows of the best plan under each other order, where it comes close to the preferred one.

    A searched order stays while cuts move, and is searched anew for those that were found.  effort: simulated actions
    for each order.
    """
    preferred = min([e.preference for e in search.fitting.values()], default=0.0)
    best: dict[str, Evaluation] = {}
    for found in sorted(search.fitting.values(), key=lambda e: e.preference):
        if found.candidate.other_order:
            best.setdefault(found.candidate.other_order, found)
    for found in best.values():
        if search.asked.request.is_free and found.preference > NEAR * preferred:
            break
        near = refined(search, found, effort)
        search.tell("refine other orders")
        if near.candidate.order and near is not found:
            reordered(search, near, MOVES)
            search.tell("searched orders")


def reordered(search: Search, found: Evaluation, effort: int) -> Evaluation | None:
    """Evaluate a plan with its order searched anew for its cuts; None where none can be shorter.

    effort: as for `with_order`.
    """
    plan = replace(found.candidate, order=(), recompute=(), whole=())
    way = shortest_way(found.space, plan, found.decision.zero, found.step_ns)
    return None if way is None else search.evaluate(found.space, with_order(found.space, plan, way, effort))


def _to_beat(search: Search, fine: SearchSpace, candidate: Candidate) -> float:
    """Return the step that a plan under another order has to stay below to be compared: infinite where an order is
    asked for, or where comparing is quick."""
    free = search.fitting and fine.request.schedule == "auto" and actions_of(candidate) >= SMALL
    return search.best_ns if free else math.inf


def promising(allowed: list[Way], found: Evaluation, search: Search, fine: SearchSpace) -> Iterator[Way]:
    """Yield the orders under which a plan may become the fastest so far, or that are quickly compared.

    However it is ordered, a position does all its work, or an even part where it has several stages, and waits until
    the first forward has come to it, through stages that are shorter the more of them there are on a rank.
    O(ways * stages)."""
    micros, slices = len(found.candidate.micro_rows), max(1, len(found.candidate.token_slices))
    ahead = [0, *accumulate(e.fwd_ns / slices for e in found.estimates[:-1])]
    even = _even_ns(found)
    for way in allowed:
        least = max(
            micros * (even if way.per_rank > 1 else e.fwd_ns + e.bwd_ns) + before / way.per_rank
            for e, before in zip(found.estimates, ahead, strict=True)
        )
        if least < _to_beat(search, fine, under_order(way, found)):
            yield way


def under(way: Way, found: Evaluation, fine: SearchSpace) -> Iterator[Candidate]:
    """Yield the plan under another order, also with even cuts: its own may suit the waits of 1F1B alone; with several
    stages a rank once for each kind of cuts."""
    plan = found.candidate
    slices = plan.token_slices or fine.request.fixed_slices
    if slices and (way.schedule == SEARCHED or not find(way.schedule).sliced):
        return
    plan = under_order(way, found)
    if way.per_rank == 1:
        even = with_even_cuts(plan, found.space)
        yield from (plan,) if even is None else (plan, even)
        return
    alike = len(fine.costs.device_types) == 1
    if alike and len(set(plan.widths)) > 1:
        return
    for each in _by_speed(plan, fine):
        yield from levelled_cuts(each, fine)


def levelled_cuts(plan: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield the plan with cuts by speed that balance ranks: even ones, and those with the shortest longest stage."""
    stages, rows = plan.stages, max(plan.micro_rows)
    if stages > space.chain.n:
        return
    homes, speeds = placed(plan.placement, stages, len(plan.widths)), speeds_of(space, plan)
    own = [speeds[home] for home in homes]
    cuts = [even_bounds(space, rows, own), shortest_bounds(space, rows, own)]
    allowed = [bounds for bounds in cuts if bounds is not None and space.allows(bounds)]
    for bounds in dict.fromkeys(levelled(space, rows, bounds, homes, speeds) for bounds in allowed):
        yield replace(plan, bounds=bounds)


def _by_speed(plan: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield the plan, and where positions of one pipeline are unlike also with the fastest first, and last."""
    yield plan
    speeds, starts = speeds_of(space, plan), [*accumulate(plan.widths, initial=plan.first)]
    if plan.layout.pipeline_replicas > 1 or len(space.costs.device_types) == 1:
        return
    for way in (-1, 1):
        places = sorted(range(len(speeds)), key=lambda place: way * speeds[place])
        ranks = [rank for place in places for rank in plan.layout.order[starts[place] : starts[place + 1]]]
        others = [rank for rank in plan.layout.order if rank not in ranks]
        layout = replace(plan.layout, order=tuple(others[: plan.first] + ranks + others[plan.first :]))
        if layout != plan.layout:
            yield replace(plan, layout=layout, widths=tuple([plan.widths[place] for place in places]))


def with_enough_blocks(space: SearchSpace, positions: int) -> SearchSpace:
    """Return a space of enough blocks to cut two stages for each position, or as many as there are; itself if it has.

    O(ops log ops), once for each space and number.
    """
    blocks = min(MOST_BLOCKS, PER_RANK[0] * positions * PER_STAGE)
    if blocks <= space.chain.n or space.chain.n >= len(space.fine.ops):
        return space
    if blocks in space.finer:
        return space.finer[blocks]
    space.finer[blocks] = space.over(blocks_of(space.fine, space.request, blocks))
    return space.finer[blocks]
