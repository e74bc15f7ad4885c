"""Other orders for the best plans so far: split backwards, several stages a rank, and orders that are searched.

The dynamic programs of the search stand for 1F1B's family.  What another order gains depends on the bubble that is left
and on memory, not on where exactly the cuts are, so the best plans of different shapes are tried under every other
schedule (`Way`), those with several stages a rank with cuts made again (`even_cuts`), and each is simulated within
memory like every candidate.  The searched order, which takes longest to find, is tried last and for the few best.

Where the planner may choose, an order has to save enough to be worth it (`Candidate.preference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from autopart.ir.device_kinds import DEVICE_KINDS
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import forced_bounds, module_span
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import LOOP, ONE, V, placed
from autopart.passes.program.schedules import find
from autopart.passes.search.candidate import Candidate
from autopart.passes.search.evaluation import Evaluation, Search
from autopart.passes.search.refinement import actions_of
from autopart.passes.search.search import with_even_cuts
from autopart.passes.search.space import ORDERS, PER_RANK, PlanRequest, SearchSpace, is_other
from autopart.passes.search.variants.even_cuts import even_bounds, levelled, shortest_bounds
from autopart.passes.search.variants.searched import Ordered, listed_ways, with_order

SHAPES = 4
"""Plans of different shapes that are tried under other orders."""
ORDERED = 1
"""Plans, of those with listed orders, that get a searched one."""
SMALL = 20_000
"""Actions of a step up to which every order is compared, also those that cannot win, to report what they take."""
MOVES = 100_000
"""Computes that may be replayed to make one searched order shorter."""
PER_STAGE, MOST_BLOCKS = 8, 1024
"""Blocks per stage, and the most, from which stages of ranks with two of them are made: with fewer the loads of ranks
differ by more than the bubble that is saved (GPT-3 on 48 ranks with 4 blocks a stage: by 15 %)."""
LITTLE = 0.03
"""A plan of which less is idle is not tried under other orders, where the planner may choose."""


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
            found += [Way(name, number, placement) for number in numbers if _supports(name, number, placement)]
    return found


def _supports(name: str, per_rank: int, placement: str) -> bool:
    """Return whether a schedule has an order for this number of stages a rank."""
    if name == "zb-v":
        return per_rank == 2
    return (per_rank == 1) == (placement == ONE)


def _trials(search: Search) -> Iterator[tuple[Way, Evaluation, SearchSpace]]:
    """Yield the orders that the request allows, each with a plan that it may shorten, and the space to cut again."""
    fine, allowed = search.asked, ways(search.asked.request)
    shapes = [found for found in search.finalists(SHAPES) if _may_gain(found, fine)] if allowed else []
    search.other_orders = bool(shapes)
    most = max([len(found.candidate.widths) for found in shapes], default=0)
    if PER_RANK[0] * most * PER_STAGE > fine.chain.n:
        fine = _finer(fine, min(MOST_BLOCKS, PER_RANK[0] * most * PER_STAGE))
    for found in shapes:
        for way in _promising(allowed, found, search, fine):
            yield way, found, fine


def _may_gain(found: Evaluation, fine: SearchSpace) -> bool:
    """Return whether a plan leaves enough of its step idle for another order to be worth it, or to be asked for."""
    if not fine.request.is_free:
        return True
    micros = len(found.candidate.micro_rows)
    idle_ns = found.step_ns - micros * max(e.fwd_ns + e.bwd_ns for e in found.estimates)
    least_ns = micros * DEVICE_KINDS[fine.costs.cluster.kind].compute_ns
    return found.stages > 1 and idle_ns > max(least_ns, LITTLE * found.step_ns)


def evaluate_named(search: Search, effort: int) -> None:
    """Evaluate the best plans under the other named orders that the request allows."""
    for way, found, fine in _trials(search):
        actions = actions_of(_placed(way, found))
        if way.schedule == SEARCHED or (actions > effort and search.fitting):
            continue
        for candidate in _under(way, found, fine):
            effort -= actions
            search.evaluate(_space_of(candidate, found, fine), candidate)
        search.tell("other orders")


def _placed(way: Way, found: Evaluation) -> Candidate:
    """Return the plan under another order, with cuts for one stage a rank."""
    return replace(found.candidate, schedule=way.schedule, per_rank=way.per_rank, placement=way.placement)


def evaluate_searched(search: Search, effort: int) -> None:
    """Evaluate the plans whose listed orders are shortest, with orders searched for each of them.

    effort: computes of the plans for which orders are listed.
    """
    tried, ways_found = False, list[tuple[SearchSpace, Candidate, Ordered]]()
    for way, found, fine in _trials(search):
        computes = 3 * _placed(way, found).stages * len(found.candidate.micro_rows)
        if way.schedule != SEARCHED or (computes > effort and tried):
            continue
        for candidate in _under(way, found, fine):
            effort, tried = effort - computes, True
            space = _space_of(candidate, found, fine)
            known = listed_ways(space, candidate, found.decision.zero, _to_beat(search, fine, candidate))
            ways_found += [(space, candidate, each) for each in known]
        search.tell("listed orders")
    ways_found.sort(key=lambda known: known[2].step_ns)
    for space, candidate, each in ways_found[:ORDERED]:
        search.evaluate(space, with_order(space, candidate, each, MOVES))
        search.tell("searched orders")


def _to_beat(search: Search, fine: SearchSpace, candidate: Candidate) -> float:
    """Return the step that a plan under another order has to stay below to be compared: infinite where an order is
    asked for, or where comparing is quick."""
    free = search.fitting and fine.request.schedule == "auto" and actions_of(candidate) >= SMALL
    return search.best_ns if free else math.inf


def _promising(allowed: list[Way], found: Evaluation, search: Search, fine: SearchSpace) -> Iterator[Way]:
    """Yield the orders under which a plan may become the fastest so far, or that are quickly compared.

    However it is ordered, a position does all its work, and waits until the first forward has come to it, through
    stages that are shorter the more of them there are on a rank.  O(ways * stages)."""
    micros, slices = len(found.candidate.micro_rows), max(1, len(found.candidate.token_slices))
    ahead = [0, *accumulate(e.fwd_ns / slices for e in found.estimates[:-1])]
    for way in allowed:
        least = max(
            micros * (e.fwd_ns + e.bwd_ns) + before / way.per_rank
            for e, before in zip(found.estimates, ahead, strict=True)
        )
        if least < _to_beat(search, fine, _placed(way, found)):
            yield way


def _space_of(candidate: Candidate, found: Evaluation, fine: SearchSpace) -> SearchSpace:
    """Return the space whose blocks a candidate cuts."""
    return fine if candidate.per_rank > 1 else found.space


def _under(way: Way, found: Evaluation, fine: SearchSpace) -> Iterator[Candidate]:
    """Yield the plan under another order, also with even cuts: its own may suit the waits of 1F1B alone; with several
    stages a rank once for each kind of cuts."""
    plan = found.candidate
    slices = plan.token_slices or fine.request.fixed_slices
    if slices and (way.schedule == SEARCHED or not find(way.schedule).sliced):
        return
    plan = _placed(way, found)
    if way.per_rank == 1:
        even = with_even_cuts(plan, found.space)
        yield from (plan,) if even is None else (plan, even)
        return
    stages, rows = plan.stages, max(plan.micro_rows)
    if stages > fine.chain.n or len(set(plan.widths)) > 1:
        return
    homes = placed(way.placement, stages, len(plan.widths))
    cuts = [even_bounds(fine, rows, (1,) * stages), shortest_bounds(fine, rows, stages)]
    allowed = [bounds for bounds in cuts if bounds is not None and fine.allows(bounds)]
    for bounds in dict.fromkeys(levelled(fine, rows, bounds, homes) for bounds in allowed):
        yield replace(plan, bounds=bounds)


def _finer(space: SearchSpace, blocks: int) -> SearchSpace:
    """Return the space with up to this number of blocks, which can be cut at more places; itself if it has as many.

    O(ops log ops), once for each space and number.
    """
    if blocks <= space.chain.n or space.chain.n >= len(space.fine.ops):
        return space
    if blocks in space.finer:
        return space.finer[blocks]
    request, fine = space.request, space.fine
    ends = {place for group in request.keep_together() for place in module_span(fine, group)} - {len(fine.ops)}
    many = coarsen(fine, blocks=blocks, cuts=request.cuts, also=tuple(sorted(ends)))
    chain = BlockChain(many, space.chain.captured, space.chain.cost_model)
    forced = forced_bounds(many, fine, request.cuts)
    space.finer[blocks] = replace(space, chain=chain, costs=space.costs.over(chain), forced=forced)
    return space.finer[blocks]
