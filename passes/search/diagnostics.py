"""Explanations: alternatives to the plan, and the nearest change when no plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopart.ir.cluster import Cluster
from autopart.ir.decision import listed_runs
from autopart.ir.errors import InfeasibleError
from autopart.ir.graph import Graph, Op, many
from autopart.ir.plan import Alternative
from autopart.passes.search.evaluation import Candidate, Evaluation, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.search.variants.slicing import slices_of, whole_of

Retry = Callable[[PlanRequest, Cluster], Evaluation | None]
"""Another search: the best evaluation that fits, or None."""
TOO_LONG_NS = 2**52
"""Time of a micro-batch, 52 days, above which sums over a step may not fit into 64 bits."""


def alternatives(best: Evaluation, seen: Sequence[Evaluation], fastest: Evaluation) -> tuple[Alternative, ...]:
    """Return the alternatives to a plan, each with its best simulated step: data parallelism alone, pipelining alone,
    fewer and more stages, other schedules, sequences whole (or in slices, where the planner may choose), and the
    fastest plan.

    best: the chosen plan.  seen: other evaluations that fit.  fastest: the plan itself, or one with more stages.
    """
    space, stages = best.space, best.stages
    wanted: list[tuple[str, Evaluation | None]] = []
    if space.request.may_replicate and stages > 1:
        wanted += _data_parallel(best)
    own = best.candidate.per_rank
    for count in (stages - 1, stages + 1):
        if count != fastest.stages:
            alike = (e for e in seen if e.stages == count and e.candidate.per_rank == own)
            wanted.append((many(count, "stage"), _fastest(alike)))
    wanted += _other_schedules(best, seen)
    if space.request.may_replicate and best.candidate.most_replicas > 1:
        found = _fastest(e for e in seen if len(e.candidate.ranks[0]) == 1 and e.stages > 1)
        if found is not None:
            wanted.append((f"no replicas, {found.stages} stages", found))
    if best.decision.token_slices:
        wanted.append(("whole sequences", whole_of(best)))
    elif space.request.token_slices == "auto":
        sliced = slices_of(best)
        lengths = sliced.decision.token_slices if sliced is not None else ()
        wanted.append((f"slices of {listed_runs(lengths)} tokens", sliced))
    others = tuple(_alternative(name, evaluation, best) for name, evaluation in wanted if evaluation is not None)
    if fastest.stages == stages:
        return others
    name, slower = many(fastest.stages, "stage"), best.step_ns / fastest.step_ns - 1
    why = f"the plan is {slower:.1%} slower than {name}; fewer stages"
    return (Alternative(f"the fastest, {name}", fastest.step_ns, why), *others)


def _other_schedules(best: Evaluation, seen: Sequence[Evaluation]) -> list[tuple[str, Evaluation | None]]:
    """Return the fastest of each tried schedule outside 1F1B's family, and of that family where it was left."""
    tried = dict.fromkeys(e.candidate.other_order for e in seen)
    found: list[tuple[str, Evaluation | None]] = []
    for name in [name for name in tried if name != best.candidate.other_order]:
        fastest = min((e for e in seen if e.candidate.other_order == name), key=lambda e: e.step_ns)
        several = f", {fastest.candidate.per_rank} stages a rank" if fastest.candidate.per_rank > 1 else ""
        found.append((f"schedule {fastest.candidate.schedule}{several}", fastest))
    return found


def _fastest(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    return min(evaluations, key=lambda evaluation: evaluation.step_ns, default=None)


def _data_parallel(best: Evaluation) -> list[tuple[str, Evaluation]]:
    """Return one stage on as many replicas as there are devices and rows, under the best way to cut the batch.

    Nothing where no micro-batch has rows for two replicas.
    """
    space, request = best.space, best.space.request
    evaluations = []
    for micro_rows in request.micro_rows:
        replicas = min(space.costs.cluster.world, request.most_replicas(micro_rows))
        layout = Layout(replicas, 1, replicas, best.candidate.layout.order)
        candidate = Candidate((0, space.chain.n), (1,), 0, 0, layout, micro_rows, request.schedules[0])
        evaluations.append(evaluate(space, candidate))
    found = min(evaluations, key=lambda e: (e.over_bytes, e.step_ns))
    replicas = found.candidate.most_replicas
    name = "data parallel alone" if request.shards == 1 else "one stage"
    return [(f"{name}, {replicas} replicas", found)] if replicas > 1 else []


def _alternative(name: str, evaluation: Evaluation, best: Evaluation) -> Alternative:
    if not evaluation.fits:
        excess = mib(evaluation.over_bytes)
        return Alternative(name, 0, f"does not fit: {excess} too much on a device of stage {evaluation.stage}")
    slower = evaluation.step_ns / best.step_ns - 1 if best.step_ns else 0.0
    step_ns = max(1, evaluation.step_ns)
    if evaluation.decision.token_slices:
        return Alternative(name, evaluation.step_ns, f"{slower:+.1%} (slices are taken where they clearly save time)")
    micros = len(evaluation.decision.micro_rows)
    busiest = max(e.fwd_ns + e.bwd_ns for e in evaluation.estimates) * micros / step_ns
    reduce = max(e.reduce_ns for e in evaluation.estimates) / step_ns
    reason = f"its slowest stage is busy {busiest:.0%} of it"
    if reduce > 0.1:
        reason = f"sums of gradients take {reduce:.0%} of it"
    if abs(slower) < 0.0005:
        reason = "no faster than the plan"
    elif slower < 0:
        reason = _kept_from(best) or "faster by less than predictions are worth"
    return Alternative(name, evaluation.step_ns, f"{slower:+.1%} ({reason})")


def _kept_from(best: Evaluation) -> str:
    """Return what was asked for that keeps the planner from faster plans, the option that decides most of all."""
    request = best.space.request
    asked = {name: getattr(request, name) for name in ("cuts", "stages", "replicas", "pins", "together")}
    asked |= {
        name: getattr(request, name) for name in ("schedule", "stages_per_rank") if getattr(request, name) != "auto"
    }
    for name, value in asked.items():
        if value:
            shown = list(value) if isinstance(value, tuple) else value
            return f"you asked for {name}={shown}"
    return ""


# ---- nothing fits --------------------------------------------------------------------------------------------------


def check_times(graph: Graph, cluster: Cluster) -> None:
    """Raise InfeasibleError if ops take too long for 64 bits: then the rates of devices are wrong."""
    if sum(op.cost.total_ns for op in graph.ops) > TOO_LONG_NS:
        device = cluster.devices[0]
        raise InfeasibleError(
            "the devices are too slow to plan for: a step would take months",
            where=f"device 0: {device.flops_per_s} operations/s, {device.mem_bytes_per_s} bytes/s of memory",
            why="rates are numbers per second, such as 1e12",
            fix='correct the rates of the cluster, or name its devices: "cpu:2", "cuda:8"',
        )


def infeasible_error(nearest: Evaluation | None, space: SearchSpace, retry: Retry) -> InfeasibleError:
    """Return the error that no plan fits, with a change that was tried.

    nearest: the plan that lacks least memory; None if the request allows no plan at all.
    """
    cluster = space.costs.cluster
    if nearest is None:
        why = "a stage takes whole blocks, which cuts, pins and modules kept together do not allow; memory aside"
        fix = _change(space, retry, None)
        if too_many := _too_many_replicas(space.request):
            why, fix = too_many[0], f"{too_many[1]}; or {fix}"
        return InfeasibleError(
            "the model cannot be cut into stages as asked", where=", ".join(_asked(space)), why=why, fix=fix
        )
    stage, plan = nearest.stage, nearest.decision
    e = nearest.estimates[stage]
    limit = cluster.least_memory_bytes(plan.stages[stage].ranks)
    a, b = nearest.candidate.bounds[stage : stage + 2]
    blocks = nearest.space.chain.blocks.ops  # its bounds count the blocks that it was searched over
    modules = {part: op.module for op in space.fine.ops for part in op.parts or (op.name,)}
    first, last = _place(blocks[a], 0, modules), _place(blocks[b - 1], -1, modules)
    again = ", with recomputation" if any(s.recompute for s in plan.stages) else ""
    count = len(plan.micro_rows)
    return InfeasibleError(
        f"no plan fits: stage {stage} of {len(plan.stages)} needs {mib(e.peak_bytes)} and may use {mib(limit)}, "
        f"{mib(nearest.over_bytes)} too much",
        where=f"{first} to {last}, in the plan that comes nearest ({plan.schedule}, "
        f"{count} micro-batch{'es' * (count > 1)}{again})",
        why=f"weights {mib(e.param_bytes)}, gradients and optimizer state {mib(e.state_bytes)}, activations "
        f"{e.live} x {mib(e.activation_bytes)}, workspace {mib(e.workspace_bytes)}, buffers {mib(e.buffer_bytes)}",
        fix=_change(space, retry, nearest),
    )


def _too_many_replicas(request: PlanRequest) -> tuple[str, str] | None:
    """Return (why, fix) if more replicas are requested than have work in any way to cut the batch, else None."""
    asked = max(request.replicas) if isinstance(request.replicas, tuple) else request.replicas or 1
    most = max(map(request.most_replicas, request.micro_rows))
    if asked <= most:
        return None
    if request.policy == "turn":
        return (
            f"{asked} replicas take micro-batches in turn, and a step has {most} of them at most",
            f"use at most {most} replicas, or at least {asked} micro-batches",
        )
    rows, least = max(map(max, request.micro_rows)), request.least_rows
    each = "a row" if least == 1 else f"{least} rows"
    return (
        f"{asked} replicas need {each} of every micro-batch each, and micro-batches have {many(rows, 'row')} at most",
        f"use at most {many(most, 'replica')}, or micro-batches of at least {asked * least} rows",
    )


def _asked(space: SearchSpace) -> Iterator[str]:
    """Yield the options that restrict the planner, and the sizes of its input."""
    request = space.request
    for name in ("stages", "replicas", "cuts", "together", "pins"):
        if asked := getattr(request, name):
            yield f"{name}={asked}"
    yield f"{space.chain.n} blocks"
    yield f"{space.costs.cluster.world * request.shards} devices"
    least, most = min(map(min, request.micro_rows)), max(map(max, request.micro_rows))
    sizes = f"{least} to {most}" if least < most else f"{most}"
    yield f"micro-batches of {sizes} row{'s' * (most > 1)}"


def _change(space: SearchSpace, retry: Retry, nearest: Evaluation | None) -> str:
    """Return the first relaxation of the request that was tried and fits."""
    for text, request, cluster in _relaxations(space, nearest):
        found = retry(request, cluster)
        if found is not None:
            micros = many(len(found.candidate.micro_rows), "micro-batch")
            return f"{text}: tried, fits with {many(found.stages, 'stage')}, {micros}, {found.candidate.schedule}"
    return "use devices with more memory, or more of them" if nearest else "leave more options to the planner"


def _relaxations(space: SearchSpace, nearest: Evaluation | None) -> Iterator[tuple[str, PlanRequest, Cluster]]:
    """Yield changes: of what the request fixes, an option at a time before all of them, and only then of devices."""
    request, cluster = space.request, space.costs.cluster
    if request.recompute == "off":
        yield 'allow recompute="auto"', replace(request, recompute="auto", recomputed=()), cluster
    if request.zero == 0 and request.may_replicate:
        yield 'allow zero="auto"', replace(request, zero="auto"), cluster
    if request.schedule not in ("auto", "1f1b"):
        yield 'use schedule="1f1b"', replace(request, schedule="1f1b"), cluster
    fixed = _fixed(request)
    for names in fixed:
        yield f"leave {' and '.join(names)} to the planner", _without(request, names), cluster
    rows = sum(request.micro_rows[0])
    if 1 < rows <= 4096 and (1,) * rows not in request.micro_rows:
        yield f"use micro_batches={rows}", replace(request, micro_rows=((1,) * rows,)), cluster
    if request.state_factor:
        yield "use an optimizer without state (SGD)", replace(request, state_factor=0.0), cluster
    every = fixed[-1] if fixed else ()
    left = f", and leave {' and '.join(every)} to the planner" if every else ""
    for factor in (2, 4):
        inner = [replace(level, groups=level.groups * factor) for level in cluster.levels[:-1]]
        outer = replace(cluster.levels[-1], size=cluster.levels[-1].size * factor)
        more = replace(cluster, devices=cluster.devices * factor, levels=(*inner, outer))
        yield f"use {more.world * request.shards} such devices{left}", _without(request, every), more
    if nearest is not None:
        larger = tuple(replace(d, memory_bytes=d.memory_bytes + nearest.over_bytes) for d in cluster.devices)
        need = max(d.memory_bytes for d in larger)
        yield f"use devices with {mib(need)}", request, replace(cluster, devices=larger)


_FREE: Mapping[str, Any] = {"replicas": None, "stages": None, "pins": {}, "together": (), "cuts": ()}
"""What a request may fix of the stages, and the value that leaves it to the planner."""


def _without(request: PlanRequest, names: Iterable[str]) -> PlanRequest:
    return replace(request, **{name: _FREE[name] for name in names})


def _fixed(request: PlanRequest) -> list[tuple[str, ...]]:
    """Return the sets of options to leave to the planner: each, with those that number its stages, then all."""
    asked = tuple(name for name in _FREE if getattr(request, name))
    numbered = {"pins", "replicas"} if isinstance(request.replicas, tuple) else {"pins"}
    each = [
        tuple(name for name in asked if name == one or (one in ("stages", "cuts") and name in numbered))
        for one in asked
    ]
    return list(dict.fromkeys([*each, asked])) if asked else []


def _place(block: Op, end: int, modules: Mapping[str, str]) -> str:
    """Return the module of the first or the last op in a block, or the op if it has none."""
    part = (block.parts or (block.name,))[end]
    return modules.get(part) or block.module or part


def mib(size_bytes: int) -> str:
    """Return a size in words, rounded up: below a MiB in bytes, from 10 GiB on in GiB."""
    if size_bytes < 1 << 20:
        return f"{size_bytes} bytes"
    shift, unit = (20, "MiB") if size_bytes < 10 << 30 else (30, "GiB")
    tenths = -(-size_bytes * 10 >> shift)
    return f"{tenths // 10}.{tenths % 10} {unit}"
