"""Make a plan from a model and a batch, in one process: capture, loss rule, costs, passes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.capture.gc_pause import gc_paused
from autopart.capture.trace.autocast import is_stand_in
from autopart.capture.trace.to_graph import require_something_to_train
from autopart.costs.optimizer_state import narrowest_bytes, state_factor
from autopart.costs.sources import CostedGraph, costed, source_for
from autopart.files.caches import find_plan, keep_plan, planner_digest
from autopart.files.plans import VERSION, load_plan, match_plan
from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.errors import AutopartError, CaptureError, InfeasibleError, PlanError, RefusedError, UsageError
from autopart.ir.graph import Graph, LossReduction, Size
from autopart.ir.plan import Alternative, Plan, Precision
from autopart.ir.program import BUCKET_BYTES
from autopart.options import Options
from autopart.passes.graph.cuts import wanted_groups
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.ops.table import registered
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program.named import BUILT_IN, DELAYED, STASHED
from autopart.passes.program.routing import divided_values
from autopart.passes.program.schedules import find, names, streams
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.stage_costs import device_types
from autopart.planning.derive.family import ProgramFamily, another_size, capture_family
from autopart.planning.derive.reduction import WHOLE, BatchRule, loss_reduction, rule_of
from autopart.planning.derive.token_axis import AskedSlices, asked_slices, sliced_at
from autopart.planning.idle import with_slices_tried
from autopart.planning.notes import moving, notes_on
from autopart.planning.restrictions import (
    PlanningTask,
    Tell,
    at_known_sizes,
    first_size,
    needs_more_rows,
    nobody,
    other_sizes,
    ways_to_split,
    weaker,
    with_more_rows,
    with_reduction,
)
from autopart.planning.shards import fastest, require_shardable
from autopart.runtime.activity import patient

SETTLED, CLEARLY = 3, 0.95
"""Plans that are made with the costs of their own size, and the part of the fastest one's step below which another way
to cut the batch must be promised to become one of them."""

RUN_ORDERS = ("eager",)
"""Backends for whose stages the planner may choose split backwards and several stages a rank by itself."""


@contextlib.contextmanager
def _phase(what: str) -> Iterator[None]:
    """Log a phase and its seconds to the logger "autopart" at level INFO, and note it as what this process does."""
    log, began = logging.getLogger("autopart"), time.perf_counter()
    log.info("%s ...", what)
    with patient(what):
        yield
    log.info("%s took %.1f s", what, time.perf_counter() - began)


@dataclass(frozen=True)
class Planned:
    """A plan, the captured program that it was made from, and how batches are cut under it.

    captured: at the size of the plan's largest micro-batch; for a model on the meta device maybe at another size.
    costs: by which the plan was chosen, of `captured` or of the same program at another size; None for a given plan.
    """

    plan: Plan
    captured: Captured
    rule: BatchRule
    costs: CostedGraph | None = None


def make_plan(
    captures: CaptureCache,
    batch: Batch,
    cluster: Cluster,
    options: Options,
    *,
    to_run: bool = True,
    tell: Tell = nobody,
) -> Planned:
    """Plan a model for batches like `batch` on `cluster`.  to_run: only plans that the runtime can run, exactly.

    tell: is told the likely size of the plan as soon as that is known, so that other ranks can capture meanwhile.
    Raises CaptureError, RefusedError, UsageError, PlanError, InfeasibleError.
    """
    given = read_plan(options)
    if to_run:
        _require_runnable(given, options)
    captures.run_in(
        precision_of(options, given), cluster.devices[0].device_type, values_come=options.weights is not None
    )
    if given:
        tell(Size(max(given.micro_rows)))
        return _given(given, captures, batch, cluster, options)
    try:
        return _searched(captures, batch, cluster, options, to_run, tell)
    except (CaptureError, RefusedError) as refusal:
        if options.micro_batches is not None or batch.rows in (None, 1):
            raise
        try:  # the whole batch may still run
            found = _searched(captures, batch, cluster, replace(options, micro_batches=1), to_run, tell)
        except AutopartError:
            raise refusal from None
        return replace(found, plan=found.plan.with_notes(f"only one micro-batch was tried: {refusal.what}"))


def _searched(
    captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options, to_run: bool, tell: Tell
) -> Planned:
    # The program at every size that micro-batches may have, from captures at two sizes.
    splits = ways_to_split(batch, options.micro_batches)
    first = first_size(splits, batch, cluster, options)
    if len({max(micro_rows) for micro_rows in splits}) == 1:
        tell(Size(max(splits[0])))
    with _phase("capturing the model"):
        family = capture_family(captures, batch, first, other_sizes(splits, batch))
    require_something_to_train(family.base.graph)
    if options.tensor_parallel not in (1, "auto"):
        require_shardable(family.base.graph, options)
    # How the batch may be cut, and whether stages may have replicas.
    task = at_known_sizes(PlanningTask(family, splits, cluster, options, to_run, tell=tell))
    # How the losses of parts of the batch combine, or a refusal.
    task, reduction = with_reduction(task, family, splits)
    # Whether sequences may be cut, if token_slices= asks for it.
    slices = asked_slices(options.token_slices, captures, batch, family.base.graph.size)
    task = replace(task, slices=slices, notes=(*task.notes, *slices.notes))
    # The cost of every op at the size of the base; the cost model extends it to other sizes.
    costs = _costs(task)
    # The fastest plan under these costs, made once more with the costs of its own size.
    failures: list[RefusedError | InfeasibleError] = []
    for attempt in weaker(task, failures):
        try:
            built = _built(attempt, costs)
            found = _settled(attempt, costs, built, reduction)
            plan = with_slices_tried(found.plan, built, attempt, captures, partial(_built, costs=costs))
            return replace(found, plan=plan)
        except (RefusedError, InfeasibleError) as failure:
            failures.append(failure)
    raise failures[-1]


def _require_runnable(given: Plan | None, options: Options) -> None:
    """Raise UsageError, or PlanError for a given plan, if its schedule is asynchronous and nothing runs it."""
    name = given.schedule if given else options.schedule
    if name == "auto" or find(name).synchronous or streams(find(name)):
        return
    known = ("auto", *(known for known in names() if find(known).synchronous))
    raise (PlanError if given else UsageError)(
        f"schedule {name!r} cannot be run yet",
        why="it updates weights while micro-batches are in flight",
        fix=f"{'compile without plan=' if given else 'use autopart.plan to plan with it'}, or use one of "
        f"{', '.join(known)}; pipe.train runs {STASHED} and {DELAYED}",
    )


@_phase("taking the costs of its ops")
def _costs(task: PlanningTask, known: CostedGraph | None = None) -> CostedGraph:
    source = source_for(task.options.costs, task.options.backend)
    return costed(task.family.base, task.cluster.devices[0], source, known)


@_phase("searching a plan")
def _built(task: PlanningTask, costs: CostedGraph) -> Plan:
    """Return the best plan among all splits, from the cache or new."""
    twin = task.family.twin(costs.graph)
    request, notes = _request(task, costs.graph)
    cost_model = CostModel(costs.graph, twin, device_types(task.cluster))
    group_ns = DEVICE_KINDS[task.cluster.kind].group_ns
    asked = PlannerInput(costs.graph, cost_model, torch.__version__, costs.source, group_ns)
    find_plan = partial(_found_or_built, options=task.options)
    plan = fastest(asked, twin, task.cluster, request, task.options, task.slices.recipe, find_plan)
    precision = precision_of(task.options, None)
    if is_stand_in(precision, task.cluster.devices[0].device_type):
        notes = (*notes, "this torch has no CUDA: its casts are those of CPUs; to run it, plan again on the cluster")
    return replace(plan, provenance=replace(plan.provenance, precision=precision)).with_notes(*costs.notes, *notes)


def _request(task: PlanningTask, graph: Graph) -> tuple[PlanRequest, tuple[str, ...]]:
    options = task.options
    base = task.family.base
    recompute, recomputed = wanted_groups(base.graph, options.recompute, base.checkpointed)
    factor, notes = state_factor(options.optimizer, narrowest_bytes(graph), masters=options.master_weights)
    final = task.family.other is None or task.family.on_meta  # else planned once more at its own size
    request = PlanRequest(
        micro_rows=task.splits,
        stages=options.stages,
        schedule=options.schedule,
        stages_per_rank=options.stages_per_rank,
        orders=not task.to_run or options.backend in RUN_ORDERS,
        cuts=options.cuts,
        together=options.together,
        pins=options.pins,
        uncut=task.uncut,
        replicas=options.replicas,
        policy=options.replica_policy or "split",
        recompute=recompute,
        recomputed=recomputed,
        zero=options.zero,
        bucket_bytes=options.bucket_bytes or BUCKET_BYTES,
        least_rows=task.least_rows,
        token_slices=task.slices.token_slices,
        token_axis=None if task.slices.recipe is None else task.slices.recipe.axis(),
        state_factor=factor,
        prove_seconds=options.prove,
        prove_rows=None if final else graph.rows,
        only_slices=task.only_slices,
    )
    return request, notes


def _settled(task: PlanningTask, costs: CostedGraph, plan: Plan, reduction: LossReduction) -> Planned:
    """Return the plan with the costs of its own size, or a faster one that cuts the batch otherwise.

    Where its own costs make it slower than promised, and others are promised clearly less (`CLEARLY`), these get their
    own costs too, at most `SETTLED` in all.  The fastest is taken; the others are its alternatives.
    """
    promised_ns, left = plan.step_ns, task.splits
    found = [_at_own_size(task, costs, plan, reduction)]
    while len(found) < SETTLED:
        limit = CLEARLY * min(each.plan.step_ns for each in found)
        left = tuple(rows for rows in left if rows not in (plan.micro_rows, found[-1].plan.micro_rows))
        if not left or promised_ns >= limit:
            break
        try:
            plan = _built(replace(task, splits=left), costs)
            if plan.step_ns >= limit:
                break
            found.append(_at_own_size(task, costs, plan, reduction))
        except (RefusedError, InfeasibleError):
            break
    best = min(found, key=lambda each: each.plan.step_ns)
    more = tuple(
        Alternative(
            f"micro-batches of {max(other.plan.micro_rows)} rows by their own costs",
            other.plan.step_ns,
            f"{other.plan.step_ns / max(1, best.plan.step_ns) - 1:+.1%}",
        )
        for other in found
        if other is not best
    )
    outlook = replace(best.plan.outlook, alternatives=(*best.plan.outlook.alternatives, *more))
    return replace(best, plan=replace(best.plan, outlook=outlook))


def _at_own_size(task: PlanningTask, costs: CostedGraph, plan: Plan, reduction: LossReduction) -> Planned:
    """Return the plan made once more with the costs of its own size.

    A model on the meta device is not measured: only the digest of its plan is changed to its own size.
    """
    task, plan = _with_enough_rows(task, costs, plan)
    family = task.family
    size = Size(max(plan.micro_rows))
    task.tell(size)
    captured = family.base
    if family.other is not None and size != captured.graph.size:
        if not family.on_meta:
            own = replace(task, family=family.based_at(size), splits=(plan.micro_rows,))
            own = replace(own, slices=sliced_at(task.slices, family.captures, family.batch, size))
            measured = _costs(own, costs)
            task, plan = _with_enough_rows(own, measured, _built(own, measured))
            captured, costs = own.family.base, measured
        else:
            graph = family.at(size) if size.rows > 1 else (captured := family.captured(size)).graph
            plan = replace(plan, provenance=replace(plan.provenance, graph_digest=graph.shape_digest()))
    rule = _rule(plan, captured, family, reduction, task.slices)
    notes = (*task.notes, *notes_on(task.options, plan, captured.graph), *moving(plan, captured.graph, rule.steady))
    return Planned(plan.with_notes(*notes), captured, rule, costs)


def _with_enough_rows(task: PlanningTask, costs: CostedGraph, plan: Plan) -> tuple[PlanningTask, Plan]:
    """Return task and plan, or restricted ones if the model runs another program on a single row that the plan has."""
    if not needs_more_rows(task, plan):
        return task, plan
    larger = with_more_rows(task)
    return larger, _built(larger, costs)


def _rule(plan: Plan, captured: Captured, family: ProgramFamily, loss: LossReduction, slices: AskedSlices) -> BatchRule:
    """Return how batches are cut under the plan.  Raises RefusedError for a value that its replicas cannot divide."""
    if len(plan.micro_rows) == 1 and not any(stage.division.splits for stage in plan.stages):
        return BatchRule(WHOLE)
    divided = divided_values(plan.decision, captured.graph, slices.once if plan.decision.token_slices else ())
    return rule_of(family, loss, *divided)


def _given(given: Plan, captures: CaptureCache, batch: Batch, cluster: Cluster, options: Options) -> Planned:
    """Return the plan that plan= gives, checked for this model."""
    captured = captures(batch, Size(max(given.micro_rows)))
    require_something_to_train(captured.graph)
    match_plan(
        given, captured.graph, torch_version=torch.__version__, world=cluster.world, local=cluster.levels[0].size
    )
    if given.decision.shards > 1:
        require_shardable(captured.graph, options, given)
    other = None
    replicated = any(stage.division.splits for stage in given.stages)
    if len(given.micro_rows) > 1 or (replicated and batch.rows is not None):
        sizes = [Size(sum(given.micro_rows)), *(Size(rows) for rows in sorted(set(given.micro_rows)))]
        other = captures(batch, another_size(captured.graph.size, sizes))
    family = ProgramFamily(captures, batch, captured, other)
    splits = (given.micro_rows if not replicated else given.micro_rows * 2,)
    reduction = loss_reduction(family, splits, options.loss_reduction)
    slices = asked_slices(given.decision.token_slices or None, captures, batch, captured.graph.size)
    noted = given.with_notes(*notes_on(options, given, captured.graph))
    return Planned(noted, captured, _rule(given, captured, family, reduction, slices))


def _found_or_built(
    asked: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest, options: Options
) -> Plan:
    """Return the plan from the cache, else a new one, which is kept.

    Plans with a schedule of the user are not kept, since another function may have the same name.
    """
    kept = options.cache and request.schedule in ("auto", *(schedule.name for schedule in BUILT_IN))
    key = plan_key(asked, other, cluster, request) if kept else None
    found = find_plan(key, asked.graph) if key else None
    if found is not None:
        return found
    with gc_paused():
        plan = build(asked, cluster, request, options.watch)
    if key:
        keep_plan(key, plan)
    return plan


def plan_key(source: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest) -> str:
    """Return a fingerprint of everything that a plan depends on.

    It covers the graph with its costs, the capture at another size (other), cluster, request, the version of torch, the
    source of the planner and the ops that users registered.
    """
    texts = [
        f"plan {VERSION}, planner {planner_digest()}, torch {source.torch_version}, costs {source.costs}",
        _fingerprint(source.graph),
        _fingerprint(other) if other is not None else "one capture",
        repr(cluster),
        repr(request),
        repr(registered()),
        repr(source.exchange_ns),
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _fingerprint(graph: Graph) -> str:
    """Return a digest of the graph with everything that `shape_digest` leaves out but the planner reads."""
    ops = [(op.module, op.random, op.parts, astuple(op.cost)) for op in graph.ops]
    values = [(v.size_bytes, v.rows_axis) for v in graph.values]
    rest = json.dumps([ops, values, [(p.size_bytes, p.once_ns) for p in graph.params]], separators=(",", ":"))
    return f"{graph.shape_digest()} {hashlib.sha256(rest.encode()).hexdigest()}"


def read_plan(options: Options) -> Plan | None:
    """Return the plan that plan= gives, loaded and validated, or None.  Raises UsageError for an unknown schedule."""
    plan = load_plan(options.plan) if isinstance(options.plan, (str, os.PathLike)) else options.plan
    if plan is None:
        return None
    if not isinstance(plan, Plan):
        raise UsageError(f"plan is a {type(plan).__name__}", fix="pass an autopart.Plan or the path of a file")
    find(plan.schedule)
    return plan


def precision_of(options: Options, given: Plan | None) -> Precision:
    """Return the precision of the options, else of the given plan, else "fp32".  Raises UsageError if they differ."""
    if given is None:
        return options.precision or "fp32"
    planned = given.provenance.precision
    if options.precision not in (None, planned):
        raise UsageError(
            f"precision is {options.precision!r}, and the plan is for {planned!r}",
            why="a plan is made for the program in one precision",
            fix="drop precision=, or make a plan for it",
        )
    return planned
