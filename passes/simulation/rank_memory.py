"""The memory of ranks that run several stages.

    weights, gradients, optimizer state, messages and inputs of all stages of the rank
    + the most that they hold together for their backwards, at any time of the rank's order (`held`)
    + the largest workspace of one of them

With one stage a rank this is the memory of the stage (`charges`).

Assumed, and wrong where: a parameter that two stages of a rank share counts for both; the room that activations leave
for half-precision gradients at the end of a step is found for each stage alone, so that less of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.ir.plan import Decision, Estimate
from autopart.passes.simulation.charges import StageContext
from autopart.passes.simulation.held import Counts, most_bytes


def stages_together(decision: Decision) -> list[tuple[int, ...]]:
    """Return the stages of each worker, ascending: those that run on the same ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for stage, own in enumerate(decision.stages):
        found.setdefault(tuple(sorted(own.ranks)), []).append(stage)
    return [tuple(stages) for stages in found.values()]


def own_bytes(context: StageContext, estimate: Estimate) -> int:
    """Return the bytes of a stage besides what it holds for backwards, and its workspace."""
    held = context.in_flight_bytes(estimate.activation_bytes, estimate.weight_bytes)
    return estimate.peak_bytes - held - estimate.workspace_bytes


def rank_peaks(
    decision: Decision, contexts: Sequence[StageContext], estimates: Sequence[Estimate], counts: Counts
) -> Mapping[tuple[int, ...], int]:
    """Return the most bytes that a rank of each worker with several stages needs, by its stages.

    counts: of the decision's order.  O(states of the order).
    """
    found = {}
    for stages in stages_together(decision):
        if len(stages) > 1:
            own = [estimates[s] for s in stages]
            tokens = sum(decision.token_slices) or 1
            held = most_bytes(counts[stages], [e.activation_bytes for e in own], [e.weight_bytes for e in own], tokens)
            static = sum(own_bytes(contexts[s], estimates[s]) for s in stages)
            found[stages] = static + held + max(e.workspace_bytes for e in own)
    return found
