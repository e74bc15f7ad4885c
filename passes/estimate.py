"""Estimates: time, memory and messages of each stage of a plan, and the simulated step.

Memory of a device of stage s with r replicas, live = `plan.in_flight`:

    weights + gradients + optimizer state                      of the parameters that the stage uses, each once
    + live * (saved for the backward + received)               of the largest share of a micro-batch, rows / r
    + workspace                                                largest of one op, and of one recomputed group
    + 2 * (received + sent)                                    messages under way; receives are posted two ahead
    + (live - 1) * weights                                     asynchronous schedules alone: a version per micro-batch
    + the whole batch's inputs                                 on the first stage

A recomputed group keeps what enters and leaves it and pays its forward a second time.

Assumed, and wrong where: times and saved bytes of a stage are the sums of its ops'; weights, gradients and optimizer
state stay allocated; what the allocator wastes is left out.  Optimizer: reads weights, gradients and state, writes
weights and state, at memory speed.  Clones count in every stage that runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopart.ir.cluster import Cluster, Device
from autopart.ir.cost import Cost
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import ASYNC, Estimate, Plan, Stage, in_flight
from autopart.ir.program import Edge, Program
from autopart.ir.timeline import Timeline
from autopart.passes.route import assemble
from autopart.passes.sheets import CostsAt
from autopart.passes.simulate import Message, Work, simulate, step_ns
from autopart.passes.traffic import Load, bundle, ring

Tied = tuple[tuple[str, tuple[int, ...]], ...]
LONG = 20_000
"""Actions of a program from which on candidates are judged by a shorter one."""


@dataclass(frozen=True)
class Setting:
    """What estimates are made from.  kinds: distinct devices of the cluster; costs_at: (rows, kind) to the graph whose
    ops the plan names.  state_factor: bytes of optimizer state per byte of trainable parameter.  overlap: gradients
    are summed while the last backward runs."""

    cluster: Cluster
    kinds: tuple[Device, ...]
    costs_at: CostsAt
    state_factor: float = 2.0
    overlap: bool = False
    _loads: dict[tuple[tuple[int, ...], tuple[int, ...]], Load] = field(default_factory=dict, compare=False, repr=False)

    def bundle(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Load:
        """`traffic.bundle` on this cluster, each computed once."""
        if (senders, receivers) not in self._loads:
            self._loads[senders, receivers] = bundle(self.cluster, senders, receivers)
        return self._loads[senders, receivers]

    def ring(self, ranks: tuple[int, ...]) -> Load:
        """`traffic.ring` on this cluster, each computed once."""
        if (ranks, ()) not in self._loads:
            self._loads[ranks, ()] = ring(self.cluster, ranks)
        return self._loads[ranks, ()]


def kinds_of(cluster: Cluster) -> tuple[Device, ...]:
    """Distinct devices; that of rank 0 comes first."""
    return tuple(dict.fromkeys(cluster.devices))


def optimizer_ns(trained_bytes: int, state_factor: float, device: Device) -> int:
    """Nanoseconds of an optimizer's step over parameters of trained_bytes."""
    return int(trained_bytes * (3 + 2 * state_factor) * 1e9 / device.mem_bytes_per_s)


def estimate(plan: Plan, program: Program, setting: Setting) -> Plan:
    """The plan with `estimates`, `step_ns` and `bubble` filled in.

    Before: program is the plan's, verified.  step_ns of an asynchronous schedule is micro-batches times the slowest
    stage, its steady state (PipeDream, section 3.1).  bubble: idle share of the ranks that run a stage; the sums of
    gradients and the optimizer count as idle.  O(uses + actions).
    """
    known = with_estimates(plan, program.edges, setting)
    if plan.schedule == ASYNC:
        return replace(known, step_ns=steady_ns(known), bubble=0.0)
    step = step_ns(program, work_of(known, program, setting.costs_at(max(plan.micro_rows), 0), setting))
    busy = program.micros * sum(e.fwd_ns + e.bwd_ns for e in known.estimates)
    whole = step * len(plan.stages)
    return replace(known, step_ns=step, bubble=max(0.0, 1 - busy / whole) if whole else 0.0)


def with_estimates(plan: Plan, links: tuple[Edge, ...], setting: Setting) -> Plan:
    """The plan with `estimates`; links: its edges (`route.edges`).  O(uses)."""
    whole = setting.costs_at(max(plan.micro_rows), 0)
    sizes = message_bytes(links, whole)
    estimates = tuple(stage_estimate(plan, s, whole, sizes, setting) for s in range(len(plan.stages)))
    return replace(plan, estimates=estimates)


def simulated_ns(plan: Plan, links: tuple[Edge, ...], shared: Tied, setting: Setting) -> int:
    """The time of the step of a plan that has estimates.  links, shared: edges and tied parameters (`route`).

    Of a long program two short ones are played instead (`played`); the other micro-batches follow at the same pace.
    """
    stages, micros = len(plan.stages), len(plan.micro_rows)
    if plan.schedule == ASYNC:
        return steady_ns(plan)
    counts = played(stages, micros, plan.schedule)
    programs = [assemble(replace(plan, micro_rows=plan.micro_rows[:count]), links, shared) for count in counts]
    work = work_of(plan, programs[0], setting.costs_at(max(plan.micro_rows), 0), setting)
    times = [step_ns(program, work) for program in programs]
    if len(counts) == 1:
        return times[0]
    return times[1] + (times[1] - times[0]) * (micros - counts[1]) // (counts[1] - counts[0])


def played(stages: int, micros: int, schedule: str) -> tuple[int, ...]:
    """Numbers of micro-batches that are played to know the step: all, or of a long program as many as fill the
    pipeline, after which every schedule goes at an even pace, and twice as many."""
    full = stages * (2 if schedule == "1f1b-deep" else 1)
    return (full, 2 * full) if 6 * stages * micros > LONG and 3 * full < micros else (micros,)


def steady_ns(plan: Plan) -> int:
    """Time of all micro-batches when nothing is flushed: the slowest stage sets the pace, its replicas take turns."""
    return len(plan.micro_rows) * max(e.fwd_ns + e.bwd_ns + e.reduce_ns + e.optimizer_ns for e in plan.estimates)


def timeline_of(plan: Plan, program: Program, setting: Setting) -> Timeline:
    """The simulated step of a plan."""
    known = with_estimates(plan, program.edges, setting)
    return simulate(program, work_of(known, program, setting.costs_at(max(plan.micro_rows), 0), setting))


def message_bytes(links: tuple[Edge, ...], graph: Graph) -> dict[Message, int]:
    """Bytes of one message by (source stage, destination stage, "F" or "B").  O(values of edges)."""
    size = {v.name: v.size_bytes for v in graph.values}
    sizes = {(e.src, e.dst, "F"): sum(size[v] for v in e.values) for e in links}
    return sizes | {(e.dst, e.src, "B"): sum(size[v] for v in e.grads) for e in links if e.grads}


def work_of(plan: Plan, program: Program, graph: Graph, setting: Setting) -> Work:
    """What the simulator needs, from a plan that has estimates; graph: at the largest micro-batch."""
    ranks = [stage.ranks for stage in plan.stages]
    sizes = message_bytes(program.edges, graph)
    return Work(
        fwd_ns=tuple(e.fwd_ns for e in plan.estimates),
        bwd_ns=tuple(e.bwd_ns for e in plan.estimates),
        held_bytes=tuple(e.activation_bytes for e in plan.estimates),
        messages={m: (size, setting.bundle(ranks[m[0]], ranks[m[1]])) for m, size in sizes.items()},
        tied_ns=_tied_ns(program, graph, setting.cluster),
        reduce=tuple(reduction(plan, s, graph, setting) for s in range(len(ranks))),
        optimizer_ns=tuple(e.optimizer_ns for e in plan.estimates),
        overlap=setting.overlap,
    )


def reduction(plan: Plan, s: int, graph: Graph, setting: Setting) -> tuple[int, Load]:
    """Bytes of a stage's gradients and the load of their sum over its replicas."""
    return _trained_bytes(_ops(plan.stages[s], graph), graph), setting.ring(plan.stages[s].ranks)


def _ops(stage: Stage, graph: Graph) -> list[Op]:
    own = set(stage.ops)
    return [op for op in graph.ops if op.name in own]


def _trained_bytes(ops: list[Op], graph: Graph) -> int:
    used = {name for op in ops for name in op.params}
    return sum(p.size_bytes for p in graph.params if p.name in used and p.trainable)


def stage_estimate(plan: Plan, s: int, whole: Graph, sizes: dict[Message, int], setting: Setting) -> Estimate:
    """The estimate of the slowest device of a stage."""
    stage, replicas = plan.stages[s], len(plan.stages[s].ranks)
    rows = -(-max(plan.micro_rows) // replicas)
    kinds = sorted({setting.kinds.index(setting.cluster.devices[rank]) for rank in stage.ranks})
    costed = [_ops(stage, setting.costs_at(rows, kind)) for kind in kinds]
    costs = [sum((op.cost for op in ops), Cost()) for ops in costed]
    share = setting.costs_at(rows, kinds[0])
    kept, group_bytes = _kept(stage, costed[0], share)
    again = {name for group in stage.recompute for name in group}
    recompute_ns = max(sum(op.cost.fwd_ns for op in ops if op.name in again) for ops in costed)
    in_bytes = sum(size for (_, dst, kind), size in sizes.items() if dst == s and kind == "F")
    out_bytes = sum(size for (src, _, kind), size in sizes.items() if src == s and kind == "F")
    used = {name for op in costed[0] for name in op.params}
    param_bytes = sum(p.size_bytes for p in whole.params if p.name in used)
    trained = _trained_bytes(costed[0], whole)
    live = in_flight(plan.schedule, s, len(plan.stages), len(plan.micro_rows))
    optimizer_bytes = int(trained * setting.state_factor)
    state_bytes = trained + optimizer_bytes + (live - 1) * param_bytes * (plan.schedule == ASYNC)
    activation_bytes = kept + -(-in_bytes // replicas)
    workspace = costs[0].scratch_bytes + group_bytes
    buffers = 2 * (-(-in_bytes // replicas) + -(-out_bytes // replicas))
    peak_bytes = param_bytes + state_bytes + live * activation_bytes + workspace + buffers
    if s == 0:  # the first stage is given the whole batch
        values = whole.value_map()
        peak_bytes += len(plan.micro_rows) * -(-sum(values[name].size_bytes for name in whole.inputs) // replicas)
    return Estimate(
        fwd_ns=max(cost.fwd_ns for cost in costs),
        bwd_ns=max(cost.bwd_ns for cost in costs) + recompute_ns,
        flops=costs[0].flops,
        param_bytes=param_bytes,
        state_bytes=state_bytes,
        activation_bytes=activation_bytes,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        peak_bytes=peak_bytes,
        live=live,
        optimizer_bytes=optimizer_bytes,
        workspace_bytes=workspace,
        buffer_bytes=buffers,
        recompute_ns=recompute_ns,
        reduce_ns=setting.ring(stage.ranks).alone_ns(trained),
        optimizer_ns=max(optimizer_ns(trained, setting.state_factor, setting.kinds[kind]) for kind in kinds),
    )


def _kept(stage: Stage, ops: list[Op], graph: Graph) -> tuple[int, int]:
    """(bytes kept per micro-batch, bytes of the largest recomputed group), for a device's share of the rows."""
    saved = {op.name: op.cost.saved_bytes for op in ops}
    if not stage.recompute:
        return sum(saved.values()), 0
    size = {v.name: v.size_bytes for v in graph.values}
    by_name = {op.name: op for op in ops}
    made = {w for op in ops for w in op.writes}
    edges: set[str] = set()
    for group in stage.recompute:
        inside = set(group)
        written = {w for name in group for w in by_name[name].writes}
        edges |= {r for name in group for r in by_name[name].reads if r in made} - written
        edges |= written & {r for op in ops if op.name not in inside for r in op.reads}
    again = {name for group in stage.recompute for name in group}
    kept = sum(amount for name, amount in saved.items() if name not in again) + sum(size[name] for name in edges)
    return kept, max(sum(saved[name] for name in group) for group in stage.recompute)


def _tied_ns(program: Program, graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """Time of T for each stage: its gradient to the owner and the sum back, one stage after the other at the owner."""
    times = [0] * len(program.stage_ranks)
    params = graph.param_map()
    for name, stages in program.tied:
        owner = stages[0]
        for other in stages[1:]:
            link = cluster.link(program.stage_ranks[owner], program.stage_ranks[other])
            times[other] += 2 * link.transfer_ns(params[name].size_bytes)
            times[owner] += 2 * link.transfer_ns(params[name].size_bytes)
    return tuple(times)
