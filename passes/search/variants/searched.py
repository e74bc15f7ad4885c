"""Plans whose order is searched (`passes.ordering`), within the memory of every rank.

Memory that activations do not take delays W, and W fills the bubble; recomputation makes room at a price.  So a plan is
tried with as much recomputed as if its ranks held several numbers of micro-batches (`HELD`), with backwards split on
all stages or on the later ones alone, whose ranks have memory left under 1F1B.  Each gets one order, found on a shorter
step where that is long; the best ones get an order of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopart.ir.decision import Decision
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.ordering.bound import bound_ns
from autopart.passes.ordering.lists import RULES, listed
from autopart.passes.ordering.pipeline import Pipeline
from autopart.passes.ordering.replay import replay
from autopart.passes.ordering.searched import search_order
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import Tied, edges, tied
from autopart.passes.search.candidate import Candidate
from autopart.passes.search.evaluation import staged
from autopart.passes.search.memory.jointly import Choice, recomputed_jointly
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import work_of
from autopart.passes.simulation.rank_memory import own_bytes, stages_together
from autopart.passes.simulation.simulate import Work
from autopart.passes.simulation.stage_costs import stage_contexts

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
    return replace(plan, order=order, recompute=tuple([stage.recompute for stage in way.decision.stages]))


def listed_ways(space: SearchSpace, plan: Candidate, zero: int, below_ns: float = math.inf) -> list[Ordered]:
    """Return the ways to run a plan for which an order was found, the fastest first.

    zero: whether replicas share the optimizer state.  below_ns: ways of which no order takes less are left out.
    """
    decision = staged(space, plan, zero)
    links = edges(decision, space.chain.blocks)
    shared = tied(decision, space.chain.blocks) if space.may_be_tied else ()
    return sorted(_ways_of(space, decision, links, shared, below_ns), key=lambda way: way.step_ns)


def _ways_of(
    space: SearchSpace, decision: Decision, links: tuple[Edge, ...], shared: Tied, below_ns: float
) -> Iterator[Ordered]:
    """Yield the ways to run a decision for which an order was found, and some order may take less than `below_ns`."""
    shape = replace(Shape.of(decision), order=())
    positions, micros = len(shape.workers), shape.micros
    short = min(micros, FILLED * positions)
    done: set[object] = set()
    for part in HELD:
        depth = [positions if shape.homes else positions - s for s in range(shape.stages)]
        fit = _fitted(space, decision, links, [min(micros, max(1, round(part * held))) for held in depth])
        if fit is None or fit in done:
            continue
        done.add(fit)
        recomputed, estimates, rooms = fit
        work = work_of(recomputed, estimates, links, shared, space.costs)
        busiest = max(sum(estimates[s].fwd_ns + estimates[s].bwd_ns for s in own) for own in shape.workers)
        for first in SPLIT_FROM if not shape.homes else SPLIT_FROM[:1]:
            late = int(first * shape.stages)
            weight_ns = tuple([ns if s >= late else 0 for s, ns in enumerate(work.weight_ns)])
            own = replace(work, weight_ns=weight_ns)
            whole = Pipeline.of(shape, links, own, rooms)
            if bound_ns(whole) >= below_ns:
                continue
            pipeline = replace(whole, micros=short)
            orders = listed(pipeline, RULES[0])
            played = replay(pipeline, orders) if orders is not None else None
            if played is not None:
                step_ns = played.step_ns + (micros - short) * busiest
                yield Ordered(step_ns, recomputed, links, shared, own, rooms)


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
    for own in stages_together(decision):
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
