"""Other orders for the best plans so far: split backwards, several stages a rank, and orders that are searched.

The dynamic programs of the search stand for 1F1B's family.  What another order gains depends on the bubble that is left
and on memory, not on where exactly the cuts are, so the best plans of different shapes are tried under every other
schedule (`Way`), those with several stages a rank with cuts made again (`levelled`), and each is simulated within
memory like every candidate.  The searched order, which takes longest to find, is tried last and for the few best.

Memory that activations do not take delays W, and W fills the bubble; recomputation makes room at a price.  So a plan
whose order is searched (`passes.ordering`) is tried with as much recomputed as if its ranks held several numbers of
micro-batches (`HELD`), with backwards split on all stages, on the later ones alone, whose ranks have memory left under
1F1B, or on those that recompute nothing.  Each gets one order, found on a shorter step where that is long; the best
gets an order of the whole step.

Where the planner may choose, an order has to save enough to be worth it (`Candidate.preference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.decision import Decision
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.ordering.lists import RULES, listed
from autopart.passes.ordering.pipeline import Pipeline, bound_ns, replay
from autopart.passes.ordering.searched import search_order
from autopart.passes.program.named import FAMILY, SEARCHED
from autopart.passes.program.orders import LOOP, ONE, Shape, V, placed
from autopart.passes.program.routing import Tied, edges, tied
from autopart.passes.program.schedules import find
from autopart.passes.search.evaluation import Candidate, Evaluation, Search, staged
from autopart.passes.search.recomputation import Choice, recomputed_jointly
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
from autopart.passes.simulation.estimate import stage_estimates, work_of
from autopart.passes.simulation.simulate import Work
from autopart.passes.simulation.stage_costs import own_bytes, stage_contexts

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

HELD = (1.0, 0.6, 0.35)
"""Micro-batches that a rank holds, as parts of what it holds under 1F1B, for which recomputation is chosen."""
SPLIT_FROM = (0.0, 0.5, 0.75)
"""The first stage whose backward is split, as a part of all."""
FILLED = 2
"""Micro-batches per position of the shorter step on which plans are compared."""


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


def _trials(search: Search) -> Iterator[tuple[Way, Evaluation, SearchSpace]]:
    """Yield the orders that the request allows, each with a plan that it may shorten, and the space to cut again."""
    fine, allowed = search.asked, ways(search.asked.request)
    best = search.finalists(SHAPES) if allowed else []
    if best and actions_of(best[0].candidate) <= SMALL:
        best = [*search.finalists(2 * SHAPES), *search.finalists(2 * SHAPES, schedule=FAMILY[0])]
        best += search.finalists(2 * SHAPES, by_kind=True) if len(fine.costs.device_types) > 1 else []
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
    for way, found, fine in _trials(search):
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
    for way, found, fine in _trials(search):
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
            plan = replace(near.candidate, order=(), recompute=(), whole=())
            way = shortest_way(near.space, plan, near.decision.zero, near.step_ns)
            if way is not None:
                search.evaluate(near.space, with_order(near.space, plan, way, MOVES))
            search.tell("searched orders")


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
    stages, rows = plan.stages, max(plan.micro_rows)
    alike = len(fine.costs.device_types) == 1
    if stages > fine.chain.n or (alike and len(set(plan.widths)) > 1):
        return
    homes = placed(way.placement, stages, len(plan.widths))
    for each in _by_speed(plan, fine):
        speeds = speeds_of(fine, each)
        own = [speeds[home] for home in homes]
        cuts = [even_bounds(fine, rows, own), shortest_bounds(fine, rows, own)]
        allowed = [bounds for bounds in cuts if bounds is not None and fine.allows(bounds)]
        for bounds in dict.fromkeys(levelled(fine, rows, bounds, homes, speeds) for bounds in allowed):
            yield replace(each, bounds=bounds)


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


# ---- searched orders -------------------------------------------------------------------------------------------------


class Ordered(NamedTuple):
    """A way to run a plan: about the nanoseconds of its step, and what its order is searched for."""

    step_ns: int
    decision: Decision
    links: tuple[Edge, ...]
    tied: Tied
    work: Work
    room_bytes: tuple[int, ...]


def with_order(space: SearchSpace, plan: Candidate, way: Ordered, effort: int) -> Candidate:
    """Return the plan with an order for one of its ways, and with what is recomputed there.

    effort: computes that may be replayed to improve the order.
    """
    shape, ranks = replace(Shape.of(way.decision), order=()), [stage.ranks for stage in way.decision.stages]
    order = search_order(shape, way.links, way.tied, ranks, way.work, room_bytes=way.room_bytes, effort=effort).order
    recomputed = tuple([stage.recompute for stage in way.decision.stages])
    return replace(plan, order=order, recompute=recomputed, whole=shape.whole)


def shortest_way(space: SearchSpace, plan: Candidate, zero: int, below_ns: float = math.inf) -> Ordered | None:
    """Return the way to run a plan for which the shortest order was found, or None.

    zero: whether replicas share the optimizer state.  below_ns: ways of which no order takes less are left out, first
    by their times without recomputation and without limits of memory, which makes no order shorter; then it is chosen.
    """
    decision = staged(space, plan, zero)
    links = edges(decision, space.chain.blocks)
    shared = tied(decision, space.chain.blocks) if space.may_be_tied else ()
    shape = replace(Shape.of(decision), order=())
    positions, micros = len(shape.workers), shape.micros
    short = min(micros, FILLED * positions)
    best: Ordered | None = None

    def pipelines(
        decision: Decision, estimates: Sequence[Estimate], rooms: tuple[int, ...]
    ) -> Iterator[tuple[Decision, Work, Pipeline]]:
        """Yield the decision with different backwards split, where that may be shorter than what is known."""
        work = work_of(decision, tuple(estimates), links, shared, space.costs)
        for whole in _whole_backwards(decision, shape):
            pipeline = Pipeline.of(replace(shape, whole=whole), links, work, rooms)
            if bound_ns(pipeline) < min(below_ns, best.step_ns if best else math.inf):
                each = enumerate(decision.stages)
                stages = tuple([replace(stage, whole_backward=s in whole) for s, stage in each])
                yield replace(decision, stages=stages), work, pipeline

    least = stage_estimates(replace(decision, schedule="gpipe"), links, space.costs)
    if not any(pipelines(decision, least, ())):
        return None
    done: set[object] = set()
    for part in HELD:
        depth = [positions if shape.homes else positions - s for s in range(shape.stages)]
        fit = _fitted(space, decision, links, [min(micros, max(1, round(part * held))) for held in depth])
        if fit is None or fit in done:
            continue
        done.add(fit)
        recomputed, estimates, rooms = fit
        busiest = max(sum(estimates[s].fwd_ns + estimates[s].bwd_ns for s in own) for own in shape.workers)
        for own, work, every in pipelines(recomputed, estimates, rooms):
            pipeline = replace(every, micros=short)
            orders = listed(pipeline, RULES[0])
            played = replay(pipeline, orders) if orders is not None else None
            step_ns = played.step_ns + (micros - short) * busiest if played is not None else 0
            if played is not None and (best is None or step_ns < best.step_ns):
                best = Ordered(step_ns, own, links, shared, work, rooms)
    return best


def _whole_backwards(decision: Decision, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yield sets of stages whose backwards may be whole: none, earlier ones, and those that recompute."""
    some = [tuple(range(int(first * shape.stages))) for first in (SPLIT_FROM if not shape.homes else SPLIT_FROM[:1])]
    again = tuple([s for s, stage in enumerate(decision.stages) if stage.recompute])
    learning = [s for s, stage in enumerate(decision.stages) if not stage.forward_only]
    yield from dict.fromkeys(tuple([s for s in whole if s in learning]) for whole in (*some, again))


def _fitted(
    space: SearchSpace, decision: Decision, links: tuple[Edge, ...], held: Sequence[int]
) -> tuple[Decision, tuple[Estimate, ...], tuple[int, ...]] | None:
    """Return the decision, with recomputation for this number of micro-batches in flight, its estimates and the bytes
    that each worker has left for activations; None if it does not fit."""
    estimator, decision = space.costs, replace(decision, schedule="gpipe")
    known = stage_contexts(decision, links, estimator)
    contexts = [replace(context, live=live, counts=()) for context, live in zip(known, held, strict=True)]
    stages, rooms = [context.stage for context in contexts], []
    estimates = [estimator.stage(context) for context in contexts]
    for own in Shape.of(decision).workers:
        limit = estimator.cluster.least_memory_bytes(decision.stages[own[0]].ranks)
        limit -= sum([own_bytes(contexts[s], estimates[s]) for s in own])
        live = [held[s] for s in own]

        def left(choices: list[Choice], limit: int = limit) -> int:
            return limit - max([choice.estimate.workspace_bytes for choice in choices])

        def fits(choices: list[Choice], live: Sequence[int] = live, limit: int = limit) -> bool:
            sizes = [choice.estimate.activation_bytes for choice in choices]
            return sum([count * size for count, size in zip(live, sizes, strict=True)]) <= left(choices, limit)

        found = recomputed_jointly(space, [contexts[s] for s in own], fits)
        if not fits(found) or left(found, limit) <= 0:
            return None
        rooms.append(left(found, limit))
        for s, choice in zip(own, found, strict=True):
            stages[s], estimates[s] = choice.stage, choice.estimate
    return replace(decision, stages=tuple(stages)), tuple(estimates), tuple(rooms)
