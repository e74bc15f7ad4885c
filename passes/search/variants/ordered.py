"""The way to run a plan whose order is searched: what is recomputed, which backwards are split, and about its step.

Memory that activations do not take delays W, and W fills the bubble; recomputation makes room at a price.  So a plan
whose order is searched (`passes.ordering`) is tried with as much recomputed as if its ranks held several numbers of
micro-batches (`HELD`), with backwards split on all stages, on the later ones alone, whose ranks have memory left under
1F1B, or on those that recompute nothing.  Each gets one order, found on a shorter step where that is long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopart.ir.decision import Decision
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.ordering.lists import RULES, listed
from autopart.passes.ordering.pipeline import Pipeline, bound_ns, replay
from autopart.passes.ordering.searched import search_order
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import Tied, edges, tied
from autopart.passes.search.evaluation import Candidate, staged
from autopart.passes.search.recomputation import Choice, recomputed_jointly
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import stage_estimates, work_of
from autopart.passes.simulation.simulate import Work
from autopart.passes.simulation.stage_costs import own_bytes, stage_contexts

HELD = (1.0, 0.6, 0.35)
"""Micro-batches that a rank holds, as parts of what it holds under 1F1B, for which recomputation is chosen."""
SPLIT_FROM = (0.0, 0.5, 0.75)
"""The first stage whose backward is split, as a part of all."""
FILLED = 2
"""Micro-batches per position of the shorter step on which plans are compared."""


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
