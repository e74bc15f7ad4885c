"""What slices of sequences would take, where devices idle and nobody asked for them.

They are not chosen unasked: under them every batch has sequences of the length that was captured.  They take another
capture, at another length, so they are tried where a plan is asked for and not where a pipeline starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopart.capture import CaptureCache
from autopart.ir.decision import listed_runs
from autopart.ir.errors import CaptureError, InfeasibleError, RefusedError, UsageError
from autopart.ir.plan import Alternative, Plan
from autopart.passes.search.variants.slicing import NothingSaved
from autopart.planning.derive.token_axis import asked_slices, sequence_length
from autopart.planning.restrictions import PlanningTask

IDLE = 0.15
"""Bubble from which slices are tried."""
LONG = 64
"""Tokens of a sequence from which slices are tried."""


def with_slices_tried(
    found: Plan, known: Plan, task: PlanningTask, captures: CaptureCache, make: Callable[[PlanningTask], Plan]
) -> Plan:
    """Return a plan with an alternative in slices on its devices and micro-batches, where slices may help.

    known: the plan as it was made, with the costs that `make` makes plans by.
    """
    if not _may_help(found, known, task):
        return found
    idle = f"devices idle for {found.outlook.bubble:.0%} of the step"
    nothing_saved = found.with_notes(f"{idle}; slices of sequences save nothing")
    try:
        slices = asked_slices("auto", captures, task.family.batch, task.family.base.graph.size)
        if slices.recipe is None:
            return found.with_notes(*(f"{idle}; {note}" for note in slices.notes))
        positions = dict.fromkeys(stage.ranks for stage in known.stages)
        options = replace(task.options, stages=len(positions), replicas=tuple(map(len, positions)), stages_per_rank=1)
        tried = make(replace(task, options=options, slices=slices, splits=(known.micro_rows,), only_slices=True))
    except NothingSaved:
        return nothing_saved
    except (CaptureError, InfeasibleError, RefusedError, UsageError):
        return found
    step_ns, lengths = tried.step_ns, listed_runs(tried.decision.token_slices)
    if not lengths:
        return nothing_saved
    why = f"{step_ns / max(1, known.step_ns) - 1:+.1%}, in slices of {lengths} tokens; all batches then have one length"
    more = Alternative('token_slices="auto"', step_ns, why)
    return replace(found, outlook=replace(found.outlook, alternatives=(*found.outlook.alternatives, more)))


def _may_help(found: Plan, known: Plan, task: PlanningTask) -> bool:
    options, tokens = task.options, sequence_length(task.family.batch) or 0
    unasked = options.token_slices is None and options.tensor_parallel == 1 and options.schedule == "auto"
    return unasked and not task.to_run and tokens >= LONG and len(known.stages) > 1 and found.outlook.bubble >= IDLE
