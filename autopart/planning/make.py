"""From a model and a batch to a plan, on one process: capture, loss rule, costs, passes.  Opens no process group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from importlib import metadata

import torch

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch.batch import Batch
from autopart.capture.derive.family import ProgramFamily, another_size, capture_family
from autopart.capture.derive.reduction import WHOLE, BatchRule, loss_reduction, row_layouts
from autopart.capture.derive.token_axis import AskedSlices, asked_slices, sequence_length
from autopart.capture.gc_pause import gc_paused
from autopart.capture.habits.autocast import is_stand_in
from autopart.capture.trace.gradients import require_something_to_train
from autopart.costs.optimizer_state import narrowest_bytes, state_factor
from autopart.costs.sources import GROUP_NS, CostedGraph, costed
from autopart.files.plan_cache import find_plan, keep_plan, planner_digest
from autopart.files.plans import VERSION, load_plan, match_plan
from autopart.ir.cluster import Cluster
from autopart.ir.errors import InfeasibleError, PlanError, RefusedError, UsageError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan, Precision
from autopart.ir.plan import check as check_plan
from autopart.ir.program import BUCKET_BYTES
from autopart.ir.size import Size
from autopart.options import Options
from autopart.passes.graph.module_groups import wanted_groups
from autopart.passes.ops.cost_model import ExtrapolatedCosts
from autopart.passes.ops.table import registered
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program.routing import divided_values
from autopart.passes.program.schedules import BUILT_IN, find, names
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.stage_costs import device_types
from autopart.planning.no_effect import without_effect
from autopart.planning.problem import Problem
from autopart.planning.restrictions import (
    at_known_sizes,
    needs_more_rows,
    weaker,
    with_more_rows,
    with_reduction,
)
from autopart.planning.splits import Splits, other_sizes, ways_to_split

IDLE = 0.15
"""The part of a step that devices idle from which on slices of sequences are suggested."""
LONG = 64
"""Tokens of a sequence from which on slices are suggested."""


@contextlib.contextmanager
def _phase(what: str) -> Iterator[None]:
    """Report a phase and its seconds to the logger "autopart", at level INFO."""
    log, began = logging.getLogger("autopart"), time.perf_counter()
    log.info("%s ...", what)
    yield
    log.info("%s took %.1f s", what, time.perf_counter() - began)


@dataclass(frozen=True)
class Planned:
    """A plan, the captured program that it was made from, and how batches are cut under it.

    captured: at the size of the plan's largest micro-batch; of a model on the meta device it may be at another.
    """

    plan: Plan
    captured: Captured
    rule: BatchRule

    @property
    def weight(self) -> LossReduction:
        """How the losses of micro-batches combine."""
        return self.rule.reduction


def make_plan(
    captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options, *, to_run: bool = True
) -> Planned:
    """Plan a model for batches like `batch` on `cluster`; to_run: only what the runtime can run, exactly.

    Raises CaptureError, RefusedError (what cannot be exact), UsageError, PlanError, InfeasibleError.
    """
    given = read_plan(options)
    if to_run:
        _require_runnable(given, options)
    captures.run_in(precision_of(options, given), cluster.kind)
    if given:
        return _given(given, captures, batch, cluster, options)
    # The program at every size that micro-batches may have, from captures at two of them.
    splits = ways_to_split(batch, options.micro_batches)
    first = _first_size(splits, batch, cluster, options)
    with _phase("capturing the model"):
        family = capture_family(captures, batch, first, other_sizes(splits, batch))
    require_something_to_train(family.base.graph)
    # What to plan: how the batch may be cut, and whether stages may have replicas.
    problem = at_known_sizes(Problem(family, splits, cluster, options, to_run))
    # How the losses of its parts combine to the batch's, or a refusal.
    problem, reduction = with_reduction(problem, family, splits)
    # Whether sequences may be cut, where that is asked for.
    problem = _with_slices(problem, captures, batch)
    # What every op costs at the size of the base; the cost model extends it to where the program is known.
    costs = _costs(problem)
    # The fastest plan under these costs; it has to be the program that will run, with the costs of its own size.
    failures: list[RefusedError | InfeasibleError] = []
    for attempt in weaker(problem, failures):
        try:
            return _settled(attempt, costs, _built(attempt, costs), reduction)
        except (RefusedError, InfeasibleError) as failure:
            failures.append(failure)
    raise failures[-1]


def _require_runnable(given: Plan | None, options: Options) -> None:
    """Raise UsageError, or PlanError for a given plan, if its schedule is asynchronous and has no update function."""
    name = given.schedule if given else options.schedule
    if name == "auto" or find(name).synchronous or find(name).update:
        return
    known = ("auto", *(known for known in names() if find(known).synchronous))
    raise (PlanError if given else UsageError)(
        f"schedule {name!r} cannot be run yet",
        why="it updates weights while micro-batches are in flight, and has no function for that",
        fix=f"register a Schedule with update=, or plan with one of {', '.join(known)}",
    )


def _with_slices(problem: Problem, captures: CaptureCache, batch: Batch) -> Problem:
    """With the slices that are asked for."""
    asked = asked_slices(problem.options.token_slices, captures, batch, problem.family.base.graph.size)
    return replace(problem, slices=asked, notes=(*problem.notes, *asked.notes))


@_phase("taking the costs of its ops")
def _costs(problem: Problem) -> CostedGraph:
    return costed(problem.family.base, problem.cluster.devices[0], problem.options.costs)


@_phase("searching a plan")
def _built(problem: Problem, costs: CostedGraph) -> Plan:
    """The plan for one of the splits, kept from before or new."""
    resizable = problem.family.resizable(costs.graph)
    request, notes = _request(problem, costs.graph)
    cost_model = ExtrapolatedCosts(resizable, device_types(problem.cluster))
    asked = PlannerInput(costs.graph, cost_model, torch.__version__, costs.source, GROUP_NS[problem.cluster.kind])
    plan = _found_or_built(asked, resizable.other, problem.cluster, request, problem.options)
    precision = precision_of(problem.options, None)
    if is_stand_in(precision, problem.cluster.kind):
        notes = (*notes, "this torch has no CUDA: its casts are those of CPUs; to run it, plan again on the cluster")
    notes = (*costs.notes, *notes, *_hint_at_slices(problem, plan))
    return replace(plan, provenance=replace(plan.provenance, precision=precision)).with_notes(*notes)


def _hint_at_slices(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """A note where slices of sequences may pay: to try them takes a second capture, so they are tried when asked."""
    if problem.options.token_slices is not None or plan.bubble < IDLE or len(plan.stages) < 2:
        return ()
    tokens = sequence_length(problem.family.batch)
    if tokens is None or tokens < LONG:
        return ()
    return (f'devices idle for {plan.bubble:.0%} of the step: token_slices="auto" tries slices of the sequences',)


def _request(problem: Problem, graph: Graph) -> tuple[PlanRequest, tuple[str, ...]]:
    """What is asked of the passes, and what to say about the optimizer."""
    options = problem.options
    base = problem.family.base
    recompute, recomputed = wanted_groups(base.graph, options.recompute, base.checkpointed)
    factor, notes = state_factor(options.optimizer, narrowest_bytes(graph), masters=options.master_weights)
    final = problem.family.other is None or problem.family.on_meta  # else it is planned once more at its own size
    request = PlanRequest(
        micro_rows=problem.splits,
        stages=options.stages,
        schedule=options.schedule,
        cuts=options.cuts,
        together=options.together,
        pins=options.pins,
        uncut=problem.uncut,
        replicas=options.replicas,
        policy=options.replica_policy or "split",
        recompute=recompute,
        recomputed=recomputed,
        zero=options.zero,
        bucket_bytes=options.bucket_bytes or BUCKET_BYTES,
        least_rows=problem.least_rows,
        token_slices=problem.slices.token_slices,
        token_axis=problem.slices.axis,
        state_factor=factor,
        prove_seconds=options.prove,
        prove_rows=None if final else graph.rows,
    )
    return request, notes


def _settled(problem: Problem, costs: CostedGraph, plan: Plan, reduction: LossReduction) -> Planned:
    """The plan for what runs: captured at its own size, and planned once more with costs of that size.

    A model without values is not measured: of its plan only the digest is that of its own size.
    """
    problem, plan = _with_enough_rows(problem, costs, plan)
    family = problem.family
    size = Size(max(plan.micro_rows))
    captured = family.base
    if family.other is not None and size != captured.graph.size:
        if not family.on_meta:
            own = replace(problem, family=family.based_at(size), splits=(plan.micro_rows,))
            measured = _costs(own)
            problem, plan = _with_enough_rows(own, measured, _built(own, measured))
            captured = own.family.base
        elif size.rows > 1:
            plan = _made_for(plan, family.at(size))
        else:
            captured = family.captured(size)
            plan = _made_for(plan, captured.graph)
    notes = (*problem.notes, *without_effect(problem.options, plan, captured.graph))
    return Planned(plan.with_notes(*notes), captured, _rule(plan, captured, family, reduction, problem.slices))


def _with_enough_rows(problem: Problem, costs: CostedGraph, plan: Plan) -> tuple[Problem, Plan]:
    """The plan, or another one where on a single row, which it has somewhere, the model runs another program."""
    if not needs_more_rows(problem, plan):
        return problem, plan
    larger = with_more_rows(problem)
    return larger, _built(larger, costs)


def _rule(plan: Plan, captured: Captured, family: ProgramFamily, loss: LossReduction, slices: AskedSlices) -> BatchRule:
    """How batches are cut under the plan.  Raises RefusedError for a value that its replicas cannot divide."""
    if len(plan.micro_rows) == 1 and not any(stage.division.splits for stage in plan.stages):
        return BatchRule(WHOLE)
    divided = divided_values(plan.decision, captured.graph, slices.once if plan.decision.token_slices else ())
    return BatchRule(loss, row_layouts(family, loss, *divided))


def _made_for(plan: Plan, graph: Graph) -> Plan:
    """The plan as one for the same model at the size of this graph."""
    return replace(plan, provenance=replace(plan.provenance, graph_digest=graph.shape_digest()))


def _given(given: Plan, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options) -> Planned:
    """The user's own plan, for this model."""
    captured = captures(batch, Size(max(given.micro_rows)))
    require_something_to_train(captured.graph)
    match_plan(
        given, captured.graph, torch_version=torch.__version__, world=cluster.world, local=cluster.levels[0].size
    )
    other = None
    replicated = any(stage.division.splits for stage in given.stages)
    if len(given.micro_rows) > 1 or (replicated and batch.rows is not None):
        sizes = [Size(sum(given.micro_rows)), *(Size(rows) for rows in sorted(set(given.micro_rows)))]
        other = captures(batch, another_size(captured.graph.size, sizes))
    family = ProgramFamily(captures, batch, captured, other)
    splits = (given.micro_rows if not replicated else given.micro_rows * 2,)
    reduction = loss_reduction(family, splits, options.loss_reduction)
    slices = asked_slices(given.decision.token_slices or None, captures, batch, captured.graph.size)
    noted = given.with_notes(*without_effect(options, given, captured.graph))
    return Planned(noted, captured, _rule(given, captured, family, reduction, slices))


def _found_or_built(
    asked: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest, options: Options
) -> Plan:
    """The plan that was made for exactly this before, else a new one, which is kept.

    A schedule of the user's is a function, which may be another one under the same name: its plans are not kept.
    """
    ours = {schedule.name for schedule in BUILT_IN}
    kept = options.cache and ours.issuperset(request.schedules)
    key = plan_key(asked, other, cluster, request) if kept else None
    found = find_plan(key, lambda plan: check_plan(plan, asked.graph)) if key else None
    if found is not None:
        return found
    with gc_paused():
        plan = build(asked, cluster, request, options.watch)
    if key:
        keep_plan(key, plan)
    return plan


def plan_key(source: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest) -> str:
    """A fingerprint of everything that a plan follows from, so that a plan is never older than its planner.

    It covers the graph with its costs, the capture that says how it grows (other), cluster, request, the version of
    torch, the planner's own source and the ops that users taught it.
    """
    texts = [
        f"plan {VERSION}, autopart {_release()} {planner_digest()}, torch {source.torch_version}, costs {source.costs}",
        _fingerprint(source.graph),
        _fingerprint(other) if other is not None else "one capture",
        repr(cluster),
        repr(request),
        repr(registered()),
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _fingerprint(graph: Graph) -> str:
    """Shapes and connections, and what `shape_digest` leaves out but the planner reads."""
    ops = [(op.module, op.random, op.parts, astuple(op.cost)) for op in graph.ops]
    values = [(v.size_bytes, v.rows_axis) for v in graph.values]
    rest = json.dumps([ops, values, [p.size_bytes for p in graph.params]], separators=(",", ":"))
    return f"{graph.shape_digest()} {hashlib.sha256(rest.encode()).hexdigest()}"


def _release() -> str:
    try:
        return metadata.version("autopart")
    except metadata.PackageNotFoundError:
        return "as source"


def read_plan(options: Options) -> Plan | None:
    """The plan that the user gave, loaded and validated, or None.  Raises UsageError for an unknown schedule."""
    plan = load_plan(options.plan) if isinstance(options.plan, (str, os.PathLike)) else options.plan
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", fix="pass an autopart.Plan or the path of a file")
    find(plan.schedule)
    return plan


def precision_of(options: Options, given: Plan | None) -> Precision:
    """What is asked for; else that of a given plan, else the model as it is.  Raises UsageError where both say
    something else."""
    if given is None:
        return options.precision or "fp32"
    planned = given.provenance.precision
    if options.precision not in (None, planned):
        raise UsageError(
            f"precision is {options.precision!r}, and the plan is for {planned!r}",
            why="the captured program, and what its messages carry, is that of one precision",
            fix="drop precision=, or make a plan for it",
        )
    return planned


def _first_size(splits: Splits, batch: Batch, cluster: Cluster, options: Options) -> Size:
    """The size to capture first: four micro-batches a stage is a fair guess (a fifth of bubble, GPipe section 2.3).

    Never one row where there are more: a program of one row may lack what others have, such as an `expand`.
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
