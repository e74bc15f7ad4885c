"""What the runtime can run today: the one list that its next releases extend.

`compile` plans within `RUNTIME`; `plan` plans within `EVERYTHING` and says of the plan what it still lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan says of itself what the runtime lacks for it
    from autopart.ir.plan import Plan

SCHEDULES = ("1f1b", "1f1b-deep", "gpipe")
"""Synchronous schedules, from the one that holds the fewest micro-batches to the one that holds the most."""
ASYNC = "pipedream"
"""1F1B without a flush, with a copy of the weights for each micro-batch in flight (PipeDream, SOSP 2019)."""
ALL_SCHEDULES = (*SCHEDULES, ASYNC)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """schedules: their names.  replicas: stages on several devices.  recompute: activations computed again.
    overlap: gradients of replicas are summed while the last backward of their stage still runs."""

    schedules: tuple[str, ...]
    replicas: bool
    recompute: bool
    overlap: bool


RUNTIME = Capabilities(schedules=SCHEDULES, replicas=False, recompute=False, overlap=False)
EVERYTHING = Capabilities(schedules=ALL_SCHEDULES, replicas=True, recompute=True, overlap=False)


def lacking(plan: Plan, abilities: Capabilities = RUNTIME) -> tuple[str, ...]:
    """What a plan needs and `abilities` do not have, in words; empty when it can be run."""
    missing = []
    if plan.schedule not in abilities.schedules:
        missing.append(f"schedule {plan.schedule}")
    if not abilities.replicas and any(len(stage.ranks) > 1 for stage in plan.stages):
        missing.append("replicas of a stage")
    if not abilities.recompute and any(stage.recompute for stage in plan.stages):
        missing.append("recomputation")
    return tuple(missing)
