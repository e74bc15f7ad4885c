"""What memory demands of a plan: a shared optimizer state, recomputation, whole backwards where a schedule splits them.

W keeps the inputs and the gradients of its products, also those of recomputed groups, which have freed them.  So a
stage with little room may have to recompute more if its backward is split, or it does not fit at all.  Then it runs
whole backwards inside of the schedule's order (`Stage.whole_backward`), if that makes the simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopart.ir.decision import Decision
from autopart.ir.program import Edge
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import edges
from autopart.passes.search.recomputation import Fitted, fitted_jointly, recomputed_stage
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import excess_of
from autopart.passes.simulation.stage_costs import stage_contexts


def fit(space: SearchSpace, decision: Decision, spare_bytes: Sequence[int]) -> Fitted:
    """Return a decision whose stages, ranks and rows are settled, with the changes that memory demands."""
    request, estimator = space.request, space.costs
    links = edges(decision, space.chain.blocks)

    def measured(decision: Decision) -> Fitted:
        return _measured(space, decision, links, spare_bytes)

    def recomputing(decision: Decision, stages: Sequence[int], spare: Sequence[int]) -> Decision:
        contexts = stage_contexts(decision, links, estimator)
        chosen = [context.stage for context in contexts]
        for s in stages:
            chosen[s] = recomputed_stage(space, contexts[s], spare[s] if spare else 0)
        return replace(decision, stages=tuple(chosen))

    everything = request.recompute == "all"
    every_stage = range(len(decision.stages))
    found = measured(recomputing(decision, every_stage, spare_bytes) if everything else decision)
    replicated = any(len(stage.ranks) > 1 for stage in decision.stages)
    if max(found.excess) > 0 and request.may_shard and replicated and not decision.zero:
        found = measured(replace(found.decision, zero=1))
    if max(found.excess) > 0 and request.may_recompute and not everything:  # before the simulation, whose times differ
        if not Shape.of(decision).homes:
            over = [s for s in every_stage if found.excess[s] > 0]
            return measured(recomputing(found.decision, over, spare_bytes))
        return fitted_jointly(space, found, measured, spare_bytes)
    return found


def without_room(split: Fitted) -> bool:
    """Return whether some stage does not fit, or recomputes."""
    return max(split.excess) > 0 or any(stage.recompute for stage in split.decision.stages)


def partly_whole(space: SearchSpace, split: Fitted, whole: Fitted, spare_bytes: Sequence[int]) -> list[Fitted]:
    """Return a plan with split backwards in which some are whole: first those of stages that do not fit otherwise, then
    also those of stages that recompute longer if they are split.

    split, whole: the plan with all backwards split, and with none.  Stages of the same ranks share memory, and go
    together.  O(blocks).
    """
    chosen, other = split.decision.stages, whole.decision.stages
    lacking = {s for s, excess in enumerate(split.excess) if excess > 0}
    pairs = enumerate(zip(split.estimates, whole.estimates, strict=True))
    slower = lacking | {s for s, (parted, single) in pairs if parted.recompute_ns > single.recompute_ns}
    found = []
    for some in dict.fromkeys((frozenset(lacking), frozenset(slower))):
        ranks = {chosen[s].ranks for s in some}
        stages = [b if a.ranks in ranks else a for a, b in zip(chosen, other, strict=True)]
        if some:
            found.append(_measured(space, replace(split.decision, stages=tuple(stages)), split.links, spare_bytes))
    return found


def _measured(space: SearchSpace, decision: Decision, links: tuple[Edge, ...], spare_bytes: Sequence[int]) -> Fitted:
    estimator, contexts = space.costs, stage_contexts(decision, links, space.costs)
    estimates = tuple([estimator.stage(context) for context in contexts])
    return Fitted(decision, links, estimates, excess_of(decision, contexts, estimator, spare_bytes))
