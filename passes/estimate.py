"""Estimates: time, memory and messages of each stage of a plan, and the simulated step.

Assumed, and wrong where: times and saved bytes of a stage are the sums of its ops'; weights, gradients and optimizer
state stay allocated; buffers of messages other than the values received, and what the allocator wastes, are left out.
Clones count in every stage that runs them.
"""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.cluster import Cluster
from autopart.ir.cost import Cost
from autopart.ir.graph import Graph
from autopart.ir.plan import Estimate, Plan, in_flight
from autopart.ir.program import Program
from autopart.ir.timeline import Timeline
from autopart.passes.simulate import simulate


def estimate(plan: Plan, graph: Graph, program: Program, cluster: Cluster, *, state_factor: float = 2.0) -> Plan:
    """The plan with `estimates`, `step_ns` and `bubble` filled in.

    Before: program is the plan's, verified; graph is the captured one, whose costs are of the largest micro-batch.
    bubble is the idle share of the ranks that run a stage.  O(uses + actions).
    """
    estimates = tuple(_stage(plan, s, graph, program, state_factor) for s in range(len(plan.stages)))
    timeline = timeline_of(replace(plan, estimates=estimates), graph, program, cluster)
    busy = sum(timeline.busy_ns(rank) for rank in program.stage_ranks)
    whole = timeline.step_ns * len(plan.stages)
    return replace(plan, estimates=estimates, step_ns=timeline.step_ns, bubble=1 - busy / whole if whole else 0.0)


def timeline_of(plan: Plan, graph: Graph, program: Program, cluster: Cluster) -> Timeline:
    """The simulated step of a plan that has estimates."""
    return simulate(
        program,
        fwd_ns=tuple(e.fwd_ns for e in plan.estimates),
        bwd_ns=tuple(e.bwd_ns for e in plan.estimates),
        cluster=cluster,
        message_bytes=message_bytes(program, graph),
        activation_bytes=tuple(e.activation_bytes for e in plan.estimates),
        tied_ns=_tied_ns(program, graph, cluster),
    )


def message_bytes(program: Program, graph: Graph) -> dict[tuple[int, int, str], int]:
    """Bytes of one message by (source stage, destination stage, "F" or "B").  O(values of edges)."""
    size = {v.name: v.size_bytes for v in graph.values}
    sizes = {(e.src, e.dst, "F"): sum(size[v] for v in e.values) for e in program.edges}
    return sizes | {(e.dst, e.src, "B"): sum(size[v] for v in e.grads) for e in program.edges if e.grads}


def _stage(plan: Plan, s: int, graph: Graph, program: Program, state_factor: float) -> Estimate:
    """activation_bytes: kept per micro-batch in flight (saved and received).  state_bytes: gradients and optimizer."""
    own = set(plan.stages[s].ops)
    ops = [op for op in graph.ops if op.name in own]
    cost = sum((op.cost for op in ops), Cost())
    used = {name for op in ops for name in op.params}
    params = [p for p in graph.params if p.name in used]
    sizes = message_bytes(program, graph)
    in_bytes = sum(size for (_, dst, kind), size in sizes.items() if dst == s and kind == "F")
    out_bytes = sum(size for (src, _, kind), size in sizes.items() if src == s and kind == "F")
    param_bytes = sum(p.size_bytes for p in params)
    state_bytes = int(sum(p.size_bytes for p in params if p.trainable) * (1 + state_factor))
    activation_bytes = cost.saved_bytes + in_bytes
    live = in_flight(plan.schedule, s, len(plan.stages), len(plan.micro_rows))
    peak_bytes = param_bytes + state_bytes + live * activation_bytes + cost.scratch_bytes
    if s == 0:  # the first stage is given the whole batch
        values = graph.value_map()
        peak_bytes += len(plan.micro_rows) * sum(values[name].size_bytes for name in graph.inputs)
    return Estimate(
        fwd_ns=cost.fwd_ns,
        bwd_ns=cost.bwd_ns,
        flops=cost.flops,
        param_bytes=param_bytes,
        state_bytes=state_bytes,
        activation_bytes=activation_bytes,
        in_bytes=in_bytes,
        out_bytes=out_bytes,
        peak_bytes=peak_bytes,
    )


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
