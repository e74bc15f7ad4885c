"""From a model and a batch to a plan, on one process: capture, loss rule, costs, passes.  Opens no process group."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch import Batch, split_rows
from autopart.capture.infer_size import infer_other_size, prime_batch_size
from autopart.capture.probe import prove_rows
from autopart.capture.rows import mark_rows, require_same_program
from autopart.costs.measure import measure_costs
from autopart.costs.optimizer_state import state_factor
from autopart.costs.profiler import profile_costs
from autopart.files.plan_cache import PlanCache
from autopart.files.plans import load_plan, match_plan
from autopart.ir.capabilities import RUNTIME, Capabilities, lacking
from autopart.ir.cluster import Cluster
from autopart.ir.errors import CaptureError, PlanError, RefusedError, UsageError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import sheets
from autopart.passes.ops.resize import is_affine, resize
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.stage_costs import device_types

WHOLE = LossReduction("any")


@dataclass(frozen=True)
class Planned:
    """A plan, the capture it was made from, and how the losses of micro-batches combine."""

    plan: Plan
    captured: Captured
    weight: LossReduction


def make_plan(
    capturer: CaptureCache, batch: Batch, cluster: Cluster, options: Options, abilities: Capabilities = RUNTIME
) -> Planned:
    """Plan a model for batches like `batch` on `cluster`, with what `abilities` has.

    Raises CaptureError, RefusedError (what cannot be exact), UsageError, PlanError, InfeasibleError.
    """
    given = read_plan(options)
    if given:
        return _given(given, capturer, batch, cluster, options, abilities)
    ways = microbatch_options(batch, cluster, options)
    first, other = _captures(capturer, batch, ways, _first_rows(ways, batch, cluster, options))
    many = any(len(rows) > 1 for rows in ways)
    weight = _weight(first, other, batch, options) if many and other is not None else WHOLE
    notes: tuple[str, ...] = ()
    if other is not None and not _grows_evenly(first, other, ways, abilities):
        ways, options, notes = _at_one_size(first, ways, options, abilities)
        first = capturer(batch, max(ways[0]))
    plan = _planned(first, other, cluster, options, ways, abilities)
    if other is not None and min(plan.micro_rows) == 1:
        larger = tuple(rows for rows in ways if min(rows) > 1)
        if not _same_on_one_row(capturer, batch, first, strict=not larger):
            plan = _planned(first, other, cluster, options, larger, abilities)
            notes += ("micro-batches of one row were left out: on a single row the model runs other operations",)
    rows = max(plan.micro_rows)
    captured = first
    if rows != first.graph.rows and other is not None:
        if _on_meta(first) and rows > 1:
            infer_other_size = resize(first.graph, other.graph, rows)
            assert infer_other_size is not None
            plan = _made_for(plan, infer_other_size)
        else:  # what will run is captured and measured at its own size, and planned once more
            captured = other if other.graph.rows == rows else capturer(batch, rows)
            require_same_program(first.graph, captured.graph)
            if _on_meta(first):
                plan = _made_for(plan, captured.graph)
            else:
                plan = _planned(captured, first, cluster, options, (plan.micro_rows,), abilities)
    weight = weight if len(plan.micro_rows) > 1 else WHOLE
    return Planned(plan.with_notes(*notes), captured, weight)


def _made_for(plan: Plan, graph: Graph) -> Plan:
    """The plan as one for the same model at the size of this graph."""
    return replace(plan, provenance=replace(plan.provenance, graph_digest=graph.shape_digest()))


def _captures(
    capturer: CaptureCache, batch: Batch, ways: tuple[tuple[int, ...], ...], rows: int
) -> tuple[Captured, Captured | None]:
    """The model at two numbers of rows, the first wanted at `rows`; of a batch without rows, or of one, once.

    A model on the meta device, whose plan is not run here, is captured once if the other can be told from that.
    """
    if batch.rows in (None, 1):
        return capturer(batch, rows), None
    telling = prime_batch_size(capturer.model, batch) if any(p.is_meta for p in capturer.model.parameters()) else None
    if telling is not None:
        with suppress(CaptureError, RefusedError):  # if it was not for the number, it comes again
            first = capturer(batch, telling)
            second = _second(telling, ways, least=2)
            return first, infer_other_size(first, second) or capturer(batch, second)
    first = capturer(batch, rows)
    return first, capturer(batch, _second(rows, ways, least=2))


def _given(
    given: Plan, capturer: CaptureCache, batch: Batch, cluster: Cluster, options: Options, abilities: Capabilities
) -> Planned:
    """The user's own plan, for this model, with what can be run."""
    if missing := lacking(given, abilities):
        raise PlanError(
            f"the plan cannot be run yet: it needs {' and '.join(missing)}",
            fix='plan with what compile can run: compile without plan=, or replicas=1 and recompute="off"',
        )
    captured = capturer(batch, max(given.micro_rows))
    match_plan(given, captured.graph, torch_version=torch.__version__, world=cluster.world)
    return Planned(given, captured, loss_weight(capturer, batch, captured, given.micro_rows, options))


def _planned(
    captured: Captured,
    other: Captured | None,
    cluster: Cluster,
    options: Options,
    ways: tuple[tuple[int, ...], ...],
    abilities: Capabilities,
) -> Plan:
    """The plan for one of these ways to cut the batch, from the costs at the captured number of rows."""
    graph, source, notes = _costs(captured, cluster, options)
    item = min((p.size_bytes // max(1, math.prod(p.shape)) for p in graph.params if p.trainable), default=4)
    factor, said = state_factor(options.optimizer, item)
    request = PlanRequest(
        micro_rows=ways,
        stages=options.stages,
        schedule=options.schedule,
        cuts=options.cuts,
        together=options.together,
        pins=options.pins,
        replicas=options.replicas,
        recompute=options.recompute,
        state_factor=factor,
        abilities=abilities,
        prove_seconds=options.prove,
        prove_rows=None if other is None or _on_meta(captured) else graph.rows,  # else it is planned once more
    )
    also = other.graph if other is not None else None
    asked = PlannerInput(graph, sheets(graph, also, device_types(cluster)), torch.__version__, source)
    cache = PlanCache(asked, also, cluster, request) if options.cache else None
    plan = cache.get() if cache else None
    if plan is None:
        plan = build(asked, cluster, request, options.watch)
        if cache:
            cache.put(plan)
    return plan.with_notes(*notes, *said)


def _on_meta(captured: Captured) -> bool:
    return any(tensor.is_meta for tensor in captured.tensors.values())


def read_plan(options: Options) -> Plan | None:
    """The plan that the user gave, loaded and validated, or None."""
    if isinstance(options.plan, (str, os.PathLike)):
        return load_plan(options.plan)
    if options.plan is not None and not isinstance(options.plan, Plan):
        raise UsageError(f"plan is a {type(options.plan).__name__}", fix="pass an autopart.Plan or the path of a file")
    return options.plan


def microbatch_options(batch: Batch, cluster: Cluster, options: Options) -> tuple[tuple[int, ...], ...]:
    """The ways to cut a batch that are tried, each the rows of its micro-batches, largest micro-batches first.

    What the user says; else the divisors of the number of rows, and powers of two where there are few divisors.
    """
    if batch.rows is None:
        if options.micro_batches not in (None, 1):
            raise UsageError(
                f"micro_batches is {options.micro_batches} and the batch has no rows",
                why="none of its tensors has an axis",
                fix="use micro_batches=1",
            )
        return ((1,),)
    if options.micro_batches:
        return (split_rows(batch.rows, options.micro_batches),)
    return tuple(split_rows(batch.rows, count) for count in micro_counts(batch.rows))


def micro_counts(rows: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying, ascending: the divisors, or also powers of two where those are few."""
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    powers = [1 << i for i in range(rows.bit_length()) if 1 << i <= rows]
    return tuple(divisors if len(divisors) >= min(4, len(powers)) else sorted({*divisors, *powers}))


def _first_rows(ways: tuple[tuple[int, ...], ...], batch: Batch, cluster: Cluster, options: Options) -> int:
    """The rows to capture first: four micro-batches a stage is a fair guess (a fifth of bubble, GPipe section 2.3).

    Never one row where there are more: a program of one row may lack what others have, such as an `expand`.
    """
    if batch.rows in (None, 1):
        return 1
    stages = options.stages or cluster.world
    wanted = 4 * stages if stages > 1 else 1
    several = [rows for rows in ways if max(rows) > 1]
    if not several:
        return 2
    nearest = min(range(len(several)), key=lambda i: abs(len(several[i]) - wanted))
    return max(several[nearest])


def _grows_evenly(first: Captured, other: Captured, ways: tuple[tuple[int, ...], ...], abilities: Capabilities) -> bool:
    """Whether the program, and so its costs, is known at every number of rows: its sizes lie on a line."""
    sizes = {max(rows) for rows in ways} | ({1} if abilities.replicas else set())
    return is_affine(first.graph, other.graph, sizes)


def _at_one_size(
    first: Captured, ways: tuple[tuple[int, ...], ...], options: Options, abilities: Capabilities
) -> tuple[tuple[tuple[int, ...], ...], Options, tuple[str, ...]]:
    """What can be planned with costs at one number of rows alone: the ways that have it, without replicas."""
    if abilities.replicas and options.replicas not in (None, 1):
        raise UsageError(
            "replicas cannot be planned for this model",
            why="its program does not grow evenly with the rows, so the costs of a share of them are not known",
            fix="use replicas=1",
        )
    known = tuple(rows for rows in ways if max(rows) == first.graph.rows) or ways[-1:]
    without = " and no replicas" if abilities.replicas and options.replicas is None else ""
    size = f"{max(known[0])} row{'s' * (max(known[0]) > 1)}"
    note = f"only micro-batches of {size}{without} were tried: the program does not grow evenly with the rows"
    return known, replace(options, replicas=1) if without else options, (note,)


def _same_on_one_row(capturer: CaptureCache, batch: Batch, first: Captured, *, strict: bool) -> bool:
    """Whether a single row runs the program of several.  strict: raise the reason when it does not."""
    try:
        require_same_program(first.graph, capturer(batch, 1).graph)
    except (CaptureError, RefusedError):
        if strict:
            raise
        return False
    return True


def loss_weight(
    capturer: CaptureCache, batch: Batch, captured: Captured, micro_rows: tuple[int, ...], options: Options
) -> LossReduction:
    """How the losses of micro-batches combine.  One needs no rule; more need one that is proven exact.

    Raises CoupledLossError when the whole loss is no combination of theirs.
    """
    if len(micro_rows) == 1:
        return WHOLE
    other = capturer(batch, _second(max(micro_rows), (micro_rows,)))
    return _weight(captured, other, batch, options)


def _weight(captured: Captured, other: Captured, batch: Batch, options: Options) -> LossReduction:
    graph = mark_rows(captured.graph, other.graph)
    stated = None if options.loss_reduction == "auto" else options.loss_reduction
    try:
        return derive_loss_weight(graph, other.graph, stated=stated)
    except UnprovenRows as unproven:
        proven = _prove(captured, other, unproven.names, batch)
    try:
        return derive_loss_weight(graph, other.graph, stated=stated, proven=proven)
    except UnprovenRows as unproven:
        raise unproven.refusal from None


def _second(rows: int, ways: tuple[tuple[int, ...], ...], least: int = 1) -> int:
    """Another number of rows to compare with: one that may be run anyway, if there is one of at least `least`."""
    sizes = (size for way in ways for size in sorted(set(way)))
    return next((size for size in sizes if size != rows and size >= least), rows + 1)


def _prove(captured: Captured, other: Captured, names: frozenset[str], batch: Batch) -> frozenset[str]:
    if _on_meta(captured):
        return names  # planning only: compile checks again, with weights
    small, large = sorted((captured, other), key=lambda c: c.graph.rows)
    return prove_rows(small, large, names, batch)


def _costs(captured: Captured, cluster: Cluster, options: Options) -> tuple[Graph, str, tuple[str, ...]]:
    """The graph with costs, where they come from, and what to say about them."""
    meta = _on_meta(captured)
    here = cluster.kind == "cpu" or torch.cuda.is_available()
    if options.costs == "analytic" or (options.costs == "auto" and (meta or not here)):
        return analytic_costs(captured.graph, cluster.devices[0]), "analytic", ()
    device = cluster.devices[0]
    graph, notes = profile_costs(captured, device) or measure_costs(captured, device)
    return graph, "measured", notes
