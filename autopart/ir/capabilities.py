"""What the runtime can run today: the one list that its next releases extend.

`compile` plans within `RUNTIME`; `plan` plans within `EVERYTHING` and says of the plan what it still lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.decision import Decision

ASYNCHRONOUS = ("pipedream",)
"""Schedules that update weights while micro-batches are in flight, each with a copy of those it began with."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """asynchronous: schedules without a flush.  replicas: stages on several devices.  recompute: activations computed
    again.  overlap: gradients of replicas are summed while the last backward of their stage still runs.  zero: replicas
    share the optimizer's state among them (`Decision.zero`).  token_slices: sequences in slices
    (`Decision.token_slices`)."""

    asynchronous: bool
    replicas: bool
    recompute: bool
    overlap: bool
    zero: bool
    token_slices: bool


RUNTIME = Capabilities(asynchronous=False, replicas=True, recompute=True, overlap=True, zero=True, token_slices=True)
EVERYTHING = Capabilities(asynchronous=True, replicas=True, recompute=True, overlap=True, zero=True, token_slices=True)


def lacking(decision: Decision, abilities: Capabilities = RUNTIME) -> tuple[str, ...]:
    """Return what a decision needs and `abilities` do not have, in words; empty when it can be run."""
    missing = []
    if decision.schedule in ASYNCHRONOUS and not abilities.asynchronous:
        missing.append(f"schedule {decision.schedule}")
    if not abilities.replicas and any(len(stage.ranks) > 1 for stage in decision.stages):
        missing.append("replicas of a stage")
    if not abilities.recompute and any(stage.recompute for stage in decision.stages):
        missing.append("recomputation")
    if decision.zero and not abilities.zero and any(len(stage.ranks) > 1 for stage in decision.stages):
        missing.append("optimizer state shared by replicas (zero)")
    if decision.token_slices and not abilities.token_slices:
        missing.append("slices of sequences")
    return tuple(missing)
