"""The recomputation of ranks with several stages, chosen for all of them together.

Each stage has a few ways to recompute more or less, which trade bytes for time.  A rank shares its memory among all of
its stages, so it takes, from none recomputed on, the step that frees the most bytes for its time, of any stage, as long
as it needs too much: the greedy of the fractional knapsack.  What it exceeds the need by is at most one such step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopart.ir.decision import Decision, Stage
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.memory.recomputation import recomputed_stage
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.charges import StageContext
from autopart.passes.simulation.held import most_bytes
from autopart.passes.simulation.rank_memory import own_bytes, stages_together
from autopart.passes.simulation.stage_costs import counts_for, stage_contexts

LEVELS = 12
"""Amounts of activations, as even parts of all, for which the recomputation of a stage is chosen."""


@dataclass(frozen=True)
class Fitted:
    """A decision over blocks that is not simulated yet.

    links: its edges.  estimates: of its stages.  excess: bytes that each stage needs beyond the memory that it may use,
    negative where it fits.
    """

    decision: Decision
    links: tuple[Edge, ...]
    estimates: tuple[Estimate, ...]
    excess: Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage with what it recomputes, and its estimate."""

    stage: Stage
    estimate: Estimate


def recomputed_jointly(
    space: SearchSpace, contexts: Sequence[StageContext], fits: Callable[[list[Choice]], bool]
) -> list[Choice]:
    """Return the choices of the stages of one rank; if nothing fits, those with as much recomputed as can be.

    contexts: with the micro-batches that each stage holds as `live`.  fits: whether choices fit the rank.
    O(stages * levels) choices, each made once, and as many calls of `fits`.
    """
    menus = [_menu(space, context) for context in contexts]
    picked = [0] * len(menus)
    while True:
        own = [menu[place] for menu, place in zip(menus, picked, strict=True)]
        if fits(own):
            return own
        steps = [
            (_price(context, menu[at], other), number, place)
            for number, (context, menu, at) in enumerate(zip(contexts, menus, picked, strict=True))
            for place, other in enumerate(menu)
            if other.estimate.activation_bytes < menu[at].estimate.activation_bytes
        ]
        if not steps:
            return own
        _, number, place = min(steps)
        picked[number] = place


def fitted_jointly(
    space: SearchSpace,
    whole: Fitted,
    measured: Callable[[Decision], Fitted],
    spare_bytes: Sequence[int],
) -> Fitted:
    """Return a decision with what its ranks have to recompute under its own order; it may still not fit.

    whole: without it.  spare_bytes: of each stage, memory to leave free.
    """
    decision, estimator = whole.decision, space.costs
    counts, known = counts_for(decision), stage_contexts(decision, whole.links, estimator)
    assert counts is not None  # an order of several stages a rank has counts of its own
    chosen = [context.stage for context in known]
    for own in stages_together(decision):
        if whole.excess[own[0]] <= 0:
            continue
        limit = estimator.cluster.least_memory_bytes(decision.stages[own[0]].ranks)
        limit -= sum([own_bytes(known[s], whole.estimates[s]) + (spare_bytes[s] if spare_bytes else 0) for s in own])

        def fits(choices: list[Choice], rows: Ints = counts[own], limit: int = limit) -> bool:
            estimates = [choice.estimate for choice in choices]
            held = [e.activation_bytes for e in estimates], [e.weight_bytes for e in estimates]
            most = most_bytes(rows, *held, sum(decision.token_slices) or 1)
            return most + max([e.workspace_bytes for e in estimates]) <= limit

        contexts = [replace(known[s], counts=(), held=None) for s in own]
        for s, choice in zip(own, recomputed_jointly(space, contexts, fits), strict=True):
            chosen[s] = choice.stage
    return measured(replace(decision, stages=tuple(chosen)))


def _price(context: StageContext, now: Choice, other: Choice) -> tuple[float, int]:
    """Return the nanoseconds per byte that a step frees, and the bytes, most first."""
    freed = context.live * (now.estimate.activation_bytes - other.estimate.activation_bytes)
    more_ns = other.estimate.bwd_ns - now.estimate.bwd_ns
    return more_ns / freed, -freed


def _menu(space: SearchSpace, context: StageContext) -> list[Choice]:
    """Return the ways to recompute a stage, the first as it is, each with other activations."""
    estimator = space.costs
    first = estimator.stage(context)
    found = {first.activation_bytes: Choice(context.stage, first)}
    if space.request.may_recompute:
        limit = estimator.cluster.least_memory_bytes(context.stage.ranks)
        taken = own_bytes(context, first) + first.workspace_bytes
        for level in range(1, LEVELS + 1):
            held = context.live * (first.activation_bytes * (LEVELS - level) // LEVELS)
            stage = recomputed_stage(space, context, limit - taken - held)
            estimate = estimator.stage(replace(context, stage=stage))
            known = found.get(estimate.activation_bytes)
            if known is None or estimate.bwd_ns < known.estimate.bwd_ns:
                found[estimate.activation_bytes] = Choice(stage, estimate)
    return list(found.values())
