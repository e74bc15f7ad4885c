"""What a model does not allow: replicas, single rows, micro-batches of other sizes.

Every reason to plan with less than was to be had stands here, with the note that the plan carries; where the user asked
for what the model does not allow, it is refused instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopart.capture.derive.family import ProgramFamily
from autopart.capture.derive.reduction import WHOLE, couples_rows, loss_reduction
from autopart.ir.errors import CaptureError, InfeasibleError, RefusedError, UsageError
from autopart.ir.graph import LossReduction
from autopart.ir.plan import Plan
from autopart.ir.shares import parts
from autopart.ir.size import Size
from autopart.planning.problem import Problem
from autopart.planning.splits import Splits

UNEVEN = "its program does not grow evenly with the rows, so the costs of a share of them are not known"
OWN_STATISTICS = (
    "each would have batch statistics and buffers of its own rows, as in DistributedDataParallel; replicas= asks for "
    "that, sync_batchnorm=True shares them"
)
NO_ROWS = "the batch has no rows to divide"
MOST_UNCUT = 8
"""Values that are kept inside a stage before replicas are given up."""
ANOTHER_PROGRAM = "on a single row the model runs other operations"


# ---- replicas ------------------------------------------------------------------------------------------------------


def without_replicas(problem: Problem, why: str) -> Problem:
    """The same with one device for each stage, and a note on it.  Raises UsageError where the user wants more."""
    _refuse_replicas(problem, why)
    options = replace(problem.options, replicas=1)
    return replace(problem, options=options, notes=(*problem.notes, f"no replicas were tried: {why}"))


def _refuse_replicas(problem: Problem, why: str) -> None:
    """Raises UsageError where the user wants replicas, which there cannot be."""
    if problem.options.replicas not in (None, 1):
        raise UsageError("replicas cannot be planned for this model", why=why, fix="use replicas=1")


def with_reduction(problem: Problem, family: ProgramFamily, splits: Splits) -> tuple[Problem, LossReduction]:
    """How the losses of parts of the batch combine; without replicas where a micro-batch is the whole batch, which has
    none to combine, and could not be cut.  family, splits: all there are, though costs be known at one size alone."""
    options = problem.options
    unasked = options.replicas is None and problem.to_run  # a plan shows what could be; what runs is exact
    if unasked and couples_rows(family.base.graph, synced=options.sync_batchnorm):
        problem = without_replicas(problem, OWN_STATISTICS)
        options = problem.options
    whole = all(len(micro_rows) == 1 for micro_rows in splits)
    if whole and options.replicas != 1:
        if family.batch.rows in (None, 1):
            return without_replicas(problem, NO_ROWS), WHOLE
        halves = tuple((*micro_rows, *micro_rows) for micro_rows in splits)
        try:
            return problem, loss_reduction(family, halves, options.loss_reduction)
        except RefusedError as refusal:
            if options.replicas is not None:
                raise
            return without_replicas(problem, refusal.what), WHOLE
    return problem, loss_reduction(family, splits, options.loss_reduction)


def weaker(problem: Problem, failures: Sequence[RefusedError | InfeasibleError]) -> Iterator[Problem]:
    """Yield the problem, then after each failure the next weaker one; raise the failure where there is none.

    failures: why the problems so far have no plan; the caller appends to it.  A value that passes between stages and
    cannot be divided among replicas is kept inside a stage; where that leaves no plan, replicas are given up, and cuts
    may be anywhere again.  Replicas that the user asked for are not given up.
    """
    yield problem
    while True:
        refusals = [failure for failure in failures if isinstance(failure, RefusedError)]
        if not refusals:
            raise failures[-1]
        last = refusals[-1]
        value = last.value if failures[-1] is last else ""
        if value and value not in problem.uncut and len(problem.uncut) < MOST_UNCUT:
            problem = replace(problem, uncut=(*problem.uncut, value))
        elif problem.options.replicas is None:
            problem = replace(without_replicas(problem, last.what), uncut=())
        else:
            raise last
        yield problem


# ---- sizes ---------------------------------------------------------------------------------------------------------


def at_known_sizes(problem: Problem) -> Problem:
    """The problem where the program, and so its costs, is known at all sizes that may be planned; else with the
    micro-batches of one size and without replicas, and a note on it."""
    sizes = {Size(max(micro_rows)) for micro_rows in problem.splits}
    shares = {Size(1)} if problem.options.replicas != 1 else set()
    family = problem.family
    if family.refusal is None and (family.other is None or family.known(sizes | shares)):
        return problem
    _refuse_replicas(problem, UNEVEN)
    kept = at_one_size(problem.splits, family.base.graph.size)
    what, options = f"only micro-batches of {Size(max(kept[0]))}", problem.options
    if options.replicas is None:
        what, options = f"{what} and no replicas", replace(options, replicas=1)
    note = f"{what} were tried: the program does not grow evenly with the rows"
    alone = family.alone(Size(max(kept[0])))
    return replace(problem, family=alone, splits=kept, options=options, notes=(*problem.notes, note))


def at_one_size(splits: Splits, size: Size) -> Splits:
    """The splits whose largest micro-batches have this size; where none has, the one of the smallest."""
    return tuple(rows for rows in splits if max(rows) == size.rows) or splits[-1:]


def needs_more_rows(problem: Problem, plan: Plan) -> bool:
    """Whether the plan has a single row somewhere, and that would be another program than the one it was made for.

    A replica's row of a model without values is seen by who has them.  Raises the reason where every split has single
    rows.
    """
    single_micro = min(plan.micro_rows) == 1
    if not single_micro and (problem.family.on_meta or _least_rows(plan) > 1):
        return False
    if problem.family.base.graph.size == Size(1):
        return False
    try:
        problem.family.captured(Size(1))
    except (CaptureError, RefusedError):
        if all(min(micro_rows) == 1 for micro_rows in problem.splits):
            raise
        return True
    return False


def with_more_rows(problem: Problem) -> Problem:
    """The same with two rows at least of every micro-batch for each replica, and a note on it.  Raises UsageError where
    the user's replicas cannot have as many."""
    asked = problem.options.replicas if problem.options.replica_policy != "turn" else 1
    most = max(asked) if isinstance(asked, tuple) else asked or 1
    larger = tuple(micro_rows for micro_rows in problem.splits if min(micro_rows) >= 2 * most)
    if not larger:
        raise UsageError(
            f"{most} replicas cannot be planned for this model",
            why=f"some would have a single row of a micro-batch, and {ANOTHER_PROGRAM}",
            fix=f"use fewer replicas, or micro-batches of at least {2 * most} rows",
        )
    what = "micro-batches of one row" if larger != problem.splits else "replicas with one row of a micro-batch"
    note = f"{what} were left out: {ANOTHER_PROGRAM}"
    return replace(problem, splits=larger, least_rows=2, notes=(*problem.notes, note))


def _least_rows(plan: Plan) -> int:
    """The fewest rows that a replica has of a micro-batch, if it has any."""
    pairs = {(rows, stage.division) for rows in plan.micro_rows for stage in plan.stages}
    return min(own for rows, divided in pairs for own in parts(divided, 0, rows) if own)
