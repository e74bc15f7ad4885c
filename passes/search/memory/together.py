"""The recomputation of ranks that run several stages, which share a memory.

What a rank can hold for backwards, after what all its stages need in any case, is divided among its stages in
proportion to what they would hold without more recomputation.  As what a rank holds at its fullest time is a sum over
its stages, it then shrinks like they do, whatever the order.  What W keeps does not shrink and blocks are not divided,
so a few rounds follow that shrink the rest more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopart.ir.decision import Decision
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.simulation.rank_memory import own_bytes, stages_together
from autopart.passes.simulation.stage_costs import Estimator, stage_contexts

ROUNDS = 5
"""Times that the stages of a rank are recomputed more."""
LEAST = 0.05
"""The least share that one round leaves of what a stage holds."""


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


def fitted_together(
    whole: Fitted,
    recomputing: Callable[[Decision, Sequence[int], Sequence[int]], Decision],
    measured: Callable[[Decision], Fitted],
    estimator: Estimator,
) -> Fitted:
    """Return a decision with as much recomputed on ranks with several stages as their memory demands.

    whole: without it.  recomputing: from a decision, stages, and memory that each has to leave free, to a decision.
    """
    over = [s for s, excess in enumerate(whole.excess) if excess > 0]
    shares = [1.0] * len(whole.excess)
    best = found = whole
    for _ in range(ROUNDS):
        shares = _shrunk(found, shares, estimator)
        found = measured(recomputing(whole.decision, over, _spare(whole, shares, estimator)))
        if max(found.excess) < max(best.excess):
            best = found
        if max(found.excess) <= 0:
            break
    return best


def _shrunk(found: Fitted, shares: Sequence[float], estimator: Estimator) -> list[float]:
    """Return for each stage the share of what it would hold that it may hold: less where the rank needs too much."""
    contexts = stage_contexts(found.decision, found.links, estimator)
    held = [c.in_flight_bytes(e.activation_bytes, 0) for c, e in zip(contexts, found.estimates, strict=True)]
    new = list(shares)
    for stages in stages_together(found.decision):
        over, most = found.excess[stages[0]], sum(held[s] for s in stages)
        if over > 0:
            for s in stages:
                new[s] = shares[s] * max(LEAST, 1 - over / max(1, most))
    return new


def _spare(whole: Fitted, shares: Sequence[float], estimator: Estimator) -> list[int]:
    """Return for each stage the memory to leave free so that it holds no more than its share."""
    contexts = stage_contexts(whole.decision, whole.links, estimator)
    spare = []
    for s, (context, estimate) in enumerate(zip(contexts, whole.estimates, strict=True)):
        held = context.in_flight_bytes(estimate.activation_bytes, estimate.weight_bytes)
        limit = estimator.cluster.least_memory_bytes(context.stage.ranks)
        spare.append(limit - own_bytes(context, estimate) - estimate.workspace_bytes - int(held * shares[s]))
    return spare
