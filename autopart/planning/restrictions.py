"""The task of the planner: ways to cut a batch that are worth trying, and what a model does not allow of it.

A model may not allow replicas, single rows, or micro-batches of several sizes.  Each restriction leaves a note in the
plan; if an option asks for what the model does not allow, it is refused instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopart.batch.batch import Batch, split_rows
from autopart.ir.cluster import Cluster
from autopart.ir.errors import CaptureError, InfeasibleError, RefusedError, UsageError
from autopart.ir.graph import LossReduction, Size
from autopart.ir.plan import Plan
from autopart.ir.shares import parts
from autopart.options import Options
from autopart.planning.derive.family import ProgramFamily
from autopart.planning.derive.reduction import WHOLE, coupling_ops, loss_reduction
from autopart.planning.derive.token_axis import WHOLE_SEQUENCES, AskedSlices

Tell = Callable[[Size], None]
MOST_MICRO_BATCHES = 1 << 16
"""Most micro-batches that the planner chooses by itself."""
Splits = tuple[tuple[int, ...], ...]
"""Ways to split a batch, each the rows of its micro-batches, largest first."""
UNEVEN = "the program does not grow evenly with the rows, so the costs of a share of them are not known"
OWN_STATISTICS = (
    "each would have batch statistics and buffers of its own rows, as in DistributedDataParallel; replicas= asks for "
    "that, sync_batchnorm=True shares them"
)
NO_ROWS = "the batch has no rows to divide"
MOST_UNCUT = 8
"""Most values that are kept inside a stage before replicas are given up."""
ANOTHER_PROGRAM = "on a single row the model runs other operations"


def nobody(size: Size) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class PlanningTask:
    """What to plan: the programs of a model at several sizes, the ways to cut its batch, and the options.

    family: its base is the program whose costs are taken.  splits: the ways to cut the batch to choose from.  to_run:
    only plans that are exact at run time.  notes: on restrictions, for the plan.  least_rows: fewest rows of a
    micro-batch that a replica may have, if it has any.  uncut: values that must not pass between stages.  tell: is told
    the size at which the plan is likely to run, as soon as that is known.  only_slices: as in `PlanRequest`.
    """

    family: ProgramFamily
    splits: Splits
    cluster: Cluster
    options: Options
    to_run: bool
    notes: tuple[str, ...] = ()
    slices: AskedSlices = WHOLE_SEQUENCES
    least_rows: int = 1
    uncut: tuple[str, ...] = ()
    tell: Tell = nobody
    only_slices: bool = False


# ---- ways to cut the batch -------------------------------------------------------------------------------------------


def ways_to_split(batch: Batch, micro_batches: int | None) -> Splits:
    """Return the splits of a batch that are tried, those with the largest micro-batches first.

    micro_batches: the option; None: the divisors of the number of rows, and powers of two if there are few divisors.
    """
    if batch.rows is None:
        if micro_batches not in (None, 1):
            raise UsageError(
                f"micro_batches is {micro_batches} and the batch has no rows",
                why="none of its tensors has an axis",
                fix="use micro_batches=1",
            )
        return ((1,),)
    if micro_batches:
        return (split_rows(batch.rows, micro_batches),)
    most = min(batch.rows, MOST_MICRO_BATCHES)
    divisors = [count for count in range(1, most + 1) if batch.rows % count == 0]
    powers = [1 << i for i in range(most.bit_length())]
    counts = divisors if len(divisors) >= min(4, len(powers)) else sorted({*divisors, *powers})
    return tuple(split_rows(batch.rows, count) for count in counts)


def other_sizes(splits: Splits, batch: Batch) -> list[Size] | None:
    """Return the sizes above one row that micro-batches may have, in order; None if the batch cannot be split."""
    if batch.rows in (None, 1):
        return None
    # The whole batch first: the model's Python may take another branch for it than for a micro-batch.
    return [Size(batch.rows), *(Size(rows) for micro_rows in splits for rows in sorted(set(micro_rows)) if rows > 1)]


def first_size(splits: Splits, batch: Batch, cluster: Cluster, options: Options) -> Size:
    """Return the size to capture first: that of about four micro-batches a stage (bubble 1/5, GPipe section 2.3).

    It has several rows if possible: a program of one row may lack ops that others have, such as an `expand`.
    """
    if batch.rows in (None, 1):
        return Size(1)
    stages = options.stages or cluster.world
    wanted = 4 * stages if stages > 1 else 1
    several = [micro_rows for micro_rows in splits if max(micro_rows) > 1]
    if not several:
        return Size(2)
    nearest = min(several, key=lambda micro_rows: abs(len(micro_rows) - wanted))
    return Size(max(nearest))


# ---- replicas ------------------------------------------------------------------------------------------------------


def without_replicas(task: PlanningTask, why: str) -> PlanningTask:
    """Return the task with one device for each stage, and a note.  Raises UsageError if replicas= asks for more."""
    _refuse_replicas(task, why)
    options = replace(task.options, replicas=1)
    return replace(task, options=options, notes=(*task.notes, f"no replicas were tried: {why}"))


def _refuse_replicas(task: PlanningTask, why: str) -> None:
    if task.options.replicas not in (None, 1):
        raise UsageError("replicas cannot be planned for this model", why=why, fix="use replicas=1")


def with_reduction(task: PlanningTask, family: ProgramFamily, splits: Splits) -> tuple[PlanningTask, LossReduction]:
    """Return the task and how the losses of parts of the batch combine.

    Replicas are left out if the only micro-batch is the whole batch and cannot be divided.  family, splits: as before
    any restriction.
    """
    options = task.options
    unasked = options.replicas is None and task.to_run
    if unasked and coupling_ops(family.base.graph, synced=options.sync_batchnorm):
        task = without_replicas(task, OWN_STATISTICS)
        options = task.options
    whole = all(len(micro_rows) == 1 for micro_rows in splits)
    if whole and options.replicas != 1:
        if family.batch.rows in (None, 1):
            return without_replicas(task, NO_ROWS), WHOLE
        halves = tuple((*micro_rows, *micro_rows) for micro_rows in splits)
        try:
            return task, loss_reduction(family, halves, options.loss_reduction)
        except RefusedError as refusal:
            if options.replicas is not None:
                raise
            return without_replicas(task, refusal.what), WHOLE
    return task, loss_reduction(family, splits, options.loss_reduction)


def weaker(task: PlanningTask, failures: Sequence[RefusedError | InfeasibleError]) -> Iterator[PlanningTask]:
    """Yield the task, then after each failure a more restricted one; raise the failure if there is none.

    failures: why the tasks so far have no plan; the caller appends to it.  A value that passes between stages and
    cannot be divided among replicas is kept inside a stage; if that leaves no plan, replicas are given up, unless
    replicas= asks for them.
    """
    yield task
    while True:
        refusals = [failure for failure in failures if isinstance(failure, RefusedError)]
        if not refusals:
            raise failures[-1]
        last = refusals[-1]
        value = last.value if failures[-1] is last else ""
        if value and value not in task.uncut and len(task.uncut) < MOST_UNCUT:
            task = replace(task, uncut=(*task.uncut, value))
        elif task.options.replicas is None:
            task = replace(without_replicas(task, last.what), uncut=())
        else:
            raise last
        yield task


# ---- sizes ---------------------------------------------------------------------------------------------------------


def at_known_sizes(task: PlanningTask) -> PlanningTask:
    """Return the task, restricted to one size of micro-batches and no replicas if others have unknown programs."""
    sizes = {Size(max(micro_rows)) for micro_rows in task.splits}
    shares = {Size(1)} if task.options.replicas != 1 else set()
    family = task.family
    if family.refusal is None and (family.other is None or family.known(sizes | shares)):
        return task
    _refuse_replicas(task, UNEVEN)
    kept = at_one_size(task.splits, family.base.graph.size)
    what, options = f"only micro-batches of {Size(max(kept[0]))}", task.options
    if options.replicas is None:
        what, options = f"{what} and no replicas", replace(options, replicas=1)
    note = f"{what} were tried: the program does not grow evenly with the rows"
    alone = family.alone(Size(max(kept[0])))
    return replace(task, family=alone, splits=kept, options=options, notes=(*task.notes, note))


def at_one_size(splits: Splits, size: Size) -> Splits:
    """Return the splits whose largest micro-batches have this size; else the split with the smallest ones."""
    return tuple(rows for rows in splits if max(rows) == size.rows) or splits[-1:]


def needs_more_rows(task: PlanningTask, plan: Plan) -> bool:
    """Return whether some part of a micro-batch has a single row, on which the model runs another program.

    Replicas of a model on the meta device are not checked.  Raises the reason if every split has single rows.
    """
    pairs = {(rows, stage.division) for rows in plan.micro_rows for stage in plan.stages}
    shares = [own for rows, divided in pairs for own in parts(divided, 0, rows)] if not task.family.on_meta else []
    if 1 not in (*plan.micro_rows, *shares) or task.family.base.graph.size == Size(1):
        return False
    try:
        task.family.captured(Size(1))
    except (CaptureError, RefusedError):
        if all(min(micro_rows) == 1 for micro_rows in task.splits):
            raise
        return True
    return False


def with_more_rows(task: PlanningTask) -> PlanningTask:
    """Return the task with at least two rows of every micro-batch for each replica, and a note.

    Raises UsageError if the replicas that replicas= asks for cannot have as many.
    """
    asked = task.options.replicas if task.options.replica_policy != "turn" else 1
    most = max(asked) if isinstance(asked, tuple) else asked or 1
    larger = tuple(micro_rows for micro_rows in task.splits if min(micro_rows) >= 2 * most)
    if not larger:
        raise UsageError(
            f"{most} replicas cannot be planned for this model",
            why=f"some would have a single row of a micro-batch, and {ANOTHER_PROGRAM}",
            fix=f"use fewer replicas, or micro-batches of at least {2 * most} rows",
        )
    what = "micro-batches of one row" if larger != task.splits else "replicas with one row of a micro-batch"
    note = f"{what} were left out: {ANOTHER_PROGRAM}"
    return replace(task, splits=larger, least_rows=2, notes=(*task.notes, note))
