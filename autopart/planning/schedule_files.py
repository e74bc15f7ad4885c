"""Schedules from files and in files, as other systems read and write them."""

from __future__ import annotations

import os
from pathlib import Path

from autopart.files.schedule_csv import read_schedule_csv, save_schedule_csv, schedule_to_csv
from autopart.ir.errors import short_errors
from autopart.ir.plan import Plan
from autopart.passes.program.given import chain_program, given_schedule
from autopart.passes.program.orders import Order, Schedule
from autopart.passes.program.schedules import register


@short_errors
def register_schedule(schedule: Schedule | Order | str | os.PathLike[str], name: str = "") -> Schedule:
    """Register a schedule under its name: a function under `name` or its own name, a file under `name` or the file's.

    A file is a CSV of torch.distributed.pipelining, for its numbers of stages and micro-batches alone.  A line of it is
    a worker, which runs all stages in it; messages, gathers and sums are left out, since they follow from the plan.

    A plan names its schedule, so every rank has to register the same one.  Registering a name again replaces the
    schedule.  Raises UsageError for a function without a usable name, for a name of a built-in schedule, and for a file
    that is not valid, with line and column; ProgramError for a file whose computes can never end.
    """
    if isinstance(schedule, str | os.PathLike):
        schedule = given_schedule(name or Path(schedule).stem, read_schedule_csv(schedule))
    return register(schedule, name)


@short_errors
def save_schedule(plan: Plan, path: str | os.PathLike[str], *, messages: bool = False) -> None:
    """Write the schedule of a plan as a CSV file that torch.distributed.pipelining loads (`_load_csv`).

    A line holds the computes of the ranks that run the same stages; `schedule="file.csv"` reads it again.  messages:
    also sends and receives, for format="compute_comms"; without them torch adds its own.  Raises UsageError for slices
    of tokens, for replicas that take micro-batches in turn, and if the file cannot be written.
    """
    save_schedule_csv(schedule_text(plan, messages=messages), path)


def schedule_text(plan: Plan, *, messages: bool = False) -> str:
    """Return what `save_schedule` writes.  Raises UsageError for what the format cannot say."""
    return schedule_to_csv(chain_program(plan.decision), messages=messages)
