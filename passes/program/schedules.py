"""Schedules: in which order each stage runs its forwards and backwards.

gpipe, 2 stages, 3 micro-batches        1f1b
0F0 0F1 0F2 0B0 0B1 0B2                 0F0 0F1 0B0 0F2 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2                 1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

from autopart.ir.errors import UsageError
from autopart.ir.plan import ALL_SCHEDULES, in_flight


def order(stages: int, micros: int, schedule: str) -> tuple[str, ...]:
    """For each stage "FFBFBB": its forwards and backwards, both in the order of the micro-batches.

    All schedules are one rule: a backward runs as soon as the stage holds as many micro-batches as it may
    (`plan.in_flight`).  All of them for GPipe (NeurIPS 2019, section 2.3), min(m, S - s) for 1F1B (DAPPLE, PPoPP 2021,
    section 3.2), which is PipeDream's order too.  O(stages * micros).
    """
    if schedule not in ALL_SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}", fix="use one of " + ", ".join(ALL_SCHEDULES))
    held = [in_flight(schedule, s, stages, micros) for s in range(stages)]
    return tuple("F" * most + "BF" * (micros - most) + "B" * most for most in held)
