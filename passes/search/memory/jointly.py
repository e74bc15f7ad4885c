"""The recomputation of ranks whose stages hold given numbers of micro-batches.

Each stage has a few ways to recompute more or less, which trade bytes for time.  A rank shares its memory among all of
its stages, so it takes, from none recomputed on, the step that frees the most bytes for its time, of any stage, as long
as it needs too much: the greedy of the fractional knapsack.  What it exceeds the need by is at most one such step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopart.ir.decision import Stage
from autopart.ir.plan import Estimate
from autopart.passes.search.memory.recomputation import recomputed_stage
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.rank_memory import own_bytes
from autopart.passes.simulation.stage_costs import StageContext

LEVELS = 12
"""Amounts of activations, as even parts of all, for which the recomputation of a stage is chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage with what it recomputes, and its estimate."""

    stage: Stage
    estimate: Estimate


def recomputed_jointly(
    space: SearchSpace, contexts: Sequence[StageContext], limit_bytes: int
) -> tuple[list[Choice], int] | None:
    """Return the choices of the stages of one rank and the bytes that they leave for what is held; None if too few.

    contexts: with the micro-batches that each stage holds as `live`.  limit_bytes: the memory of a device.
    O(stages * levels) choices, each made once.
    """
    menus = [_menu(space, context) for context in contexts]
    picked = [0] * len(menus)
    static = sum(own_bytes(context, menu[0].estimate) for context, menu in zip(contexts, menus, strict=True))

    def chosen() -> list[Choice]:
        return [menu[place] for menu, place in zip(menus, picked, strict=True)]

    while True:
        own = chosen()
        room = limit_bytes - static - max(choice.estimate.workspace_bytes for choice in own)
        if sum(c.live * o.estimate.activation_bytes for c, o in zip(contexts, own, strict=True)) <= room:
            return own, room
        steps = [
            (_price(context, menu[at], other), number, place)
            for number, (context, menu, at) in enumerate(zip(contexts, menus, picked, strict=True))
            for place, other in enumerate(menu)
            if other.estimate.activation_bytes < menu[at].estimate.activation_bytes
        ]
        if not steps:
            return None
        _, number, place = min(steps)
        picked[number] = place


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
