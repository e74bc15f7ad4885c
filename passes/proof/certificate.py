"""The certificate of a plan: a lower bound on any placement of its blocks on its stages, proved by CP-SAT (`exact`).

The stages keep their number, their devices, their replicas and the micro-batches; blocks may stand on any stage as long
as nothing flows back: all orders of the DAG, not only the one that the partition cut.  Not for asynchronous schedules,
whose steps overlap.

The bound is one on the step of a synchronous pipeline under any schedule.
Positions 0..S-1, one stage each, work one after the other on m micro-batches.  Let L_q be the forward and backward
time of one micro-batch at q, and let the critical path be the heaviest path of the DAG over edges that carry a
gradient; b_q = 1 when q holds an item of it.  Then a step takes at least

    Z = max of  m L_q                                                       for every q
                sum of L_r over r < q with b_r = 1  +  m L_q                for every q with b_q = 1

Let p be the first position that holds an item of the path, and q a later one.  Before q starts its first forward, that
micro-batch has gone forward through each position of the path from p to q, for a stage starts when it has all its
inputs; after the last backward of q (its last action) that micro-batch goes back through the same positions.  All of
this is disjoint in time from the work of q itself.  Positions off the critical path (b_q = 0) may run beside the
others, which is why the plain sum over all positions before q would be too large for a DAG with branches.  On a chain
every position holds an item of the path.  Transfers, sums of gradients, and the idle time of a position between its
first and its last action are left out.  Several stages on one position (interleaving) are not covered.

Left out of the model of a plan, so that the bound stays below every plan: times and saved bytes are those of captured
ops at a replica's share of the rows; a clone is counted once; no messages, no sums of gradients, no optimizer; a
parameter that several blocks use needs no memory, nor do activations that may be recomputed; the schedule is the one of
those allowed that holds the fewest activations.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx  # type: ignore[import-untyped, unused-ignore]

from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph, Size
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, in_flight
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.space import PlanRequest


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A pipeline of positions, one stage each; times in ns, sizes in bytes.

    times[q][v]: forward and backward of item v for one micro-batch at position q, over its replicas there.
    edges: a DAG over the items; none goes back.  micros: micro-batches of a step.  static_bytes[v]: weights, gradients,
    optimizer state.  live_bytes[q][v]: kept by v per micro-batch in flight at q.  live[q]: micro-batches in flight.
    forward_only: the edges that carry no gradient back.
    """

    times: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    micros: int
    static_bytes: tuple[int, ...]
    live_bytes: tuple[tuple[int, ...], ...]
    live: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    forward_only: tuple[tuple[int, int], ...] = ()

    def need_bytes(self, position: int, item: int) -> int:
        """Return the bytes that an item takes at a position."""
        return self.static_bytes[item] + self.live[position] * self.live_bytes[position][item]


def model_of(evaluation: Evaluation) -> PipelineModel:
    """Return the model of an evaluated plan: its stages are positions, its blocks items.  O(stages * ops)."""
    space, plan = evaluation.space, evaluation.decision
    costs, request, blocks = space.costs, space.request, space.chain.blocks
    micros, count = len(plan.micro_rows), len(plan.stages)
    times, live_bytes = [], []
    for stage in plan.stages:
        places = enumerate(costs.kinds_of(stage.ranks))
        parts = {(kind, stage.division.part(max(plan.micro_rows), replica)) for replica, kind in places}
        of_types = [[op.cost for op in space.chain.graph(Size(rows), kind).ops] for kind, rows in sorted(parts)]
        totals = (tuple(cost.total_ns for cost in of_type) for of_type in of_types)
        times.append(max(totals, key=sum))  # of unlike replicas, the slowest's alone
        recomputes = request.may_recompute or request.recomputed
        live_bytes.append(tuple(0 if recomputes else cost.saved_bytes for cost in of_types[0]))
    edges = _edges(blocks)
    users = Counter(name for op in blocks.ops for name in set(op.params))  # a tensor of several blocks counts for none
    owners = max(len(stage.ranks) for stage in plan.stages) if request.may_shard else 1
    need = {}  # bytes of weights, gradients and optimizer state
    for param in blocks.params:
        training_bytes = param.size_bytes + int(param.size_bytes * (costs.state_factor / owners))
        need[param.name] = param.size_bytes + (training_bytes if param.trainable else 0)
    return PipelineModel(
        times=tuple(times),
        edges=tuple(edges),
        micros=micros,
        static_bytes=tuple(sum(need[name] for name in set(op.params) if users[name] == 1) for op in blocks.ops),
        live_bytes=tuple(live_bytes),
        live=tuple(
            min(in_flight(find(name), s, Shape(count, micros)) for name in request.schedules) for s in range(count)
        ),
        memory_bytes=tuple(costs.cluster.least_memory_bytes(stage.ranks) for stage in plan.stages),
        forward_only=tuple(edge for edge, has_gradient in edges.items() if not has_gradient),
    )


def _edges(blocks: Graph) -> dict[tuple[int, int], bool]:
    """Return by (writer, reader) of values between blocks whether a gradient comes back."""
    writer = {w: i for i, op in enumerate(blocks.ops) for w in op.writes}
    with_gradient = {v.name for v in blocks.values if v.grad}
    edges: dict[tuple[int, int], bool] = {}
    for i, op in enumerate(blocks.ops):
        for read in op.reads:
            source = writer.get(read, i)
            if source != i:
                edges[source, i] = edges.get((source, i), False) or read in with_gradient
    return edges


def lower_bound_ns(model: PipelineModel, position_of: Sequence[int]) -> int:
    """Return Z of one pipeline, in nanoseconds: no schedule of it takes less.  position_of: of each item.

    O(items + S).
    """
    times = [0] * len(model.times)
    for item, q in enumerate(position_of):
        times[q] += model.times[q][item]
    bound, filling = model.micros * max(times), 0
    for q in sorted({position_of[item] for item in critical_path(model)}):
        bound = max(bound, filling + model.micros * times[q])
        filling += times[q]
    return bound


def relaxation_bound_ns(model: PipelineModel, path: Sequence[int]) -> int:
    """Return a lower bound on every Z, in nanoseconds: the relaxation, without a solver.  path: the critical one."""
    fastest: list[int] = [min(times) for times in zip(*model.times, strict=True)]
    micros, positions = model.micros, len(model.times)
    filled: int = micros**positions
    unfilled: int = (micros - 1) ** positions
    along_path: int = -(-sum(fastest[item] for item in path) * filled // (filled - unfilled))
    shared_work: int = -(-micros * sum(fastest) // positions)
    return max(along_path, shared_work, micros * max(fastest))


def critical_path(model: PipelineModel) -> tuple[int, ...]:
    """Return the heaviest path over edges that carry a gradient.  O(items + edges)."""
    flow = _flow(model)
    flow.remove_edges_from(model.forward_only)
    length: dict[int, int] = {}  # of the heaviest path that ends at an item
    before: dict[int, int | None] = {}  # the item before it on that path
    for item in nx.topological_sort(flow):
        before[item] = max(flow.pred[item], key=lambda u: (length[u], -u), default=None)
        last = before[item]
        length[item] = (0 if last is None else length[last]) + min(row[item] for row in model.times)
    path: list[int] = []
    here: int | None = max(length, key=lambda v: (length[v], -v))
    while here is not None:
        path.append(here)
        here = before[here]
    return tuple(reversed(path))


def _flow(model: PipelineModel) -> nx.DiGraph:
    flow = nx.DiGraph(model.edges)
    flow.add_nodes_from(range(len(model.static_bytes)))
    return flow


def off_path_slack_ns(model: PipelineModel, path: Sequence[int]) -> list[int]:
    """Return for each position the most nanoseconds that it can have without an item of the critical path.

    Then the positions before it hold the path up to some item i, and its own items are neither before i (or i itself)
    nor after the item that follows i.  O(items + edges).
    """
    flow = _flow(model)
    rank = {item: i for i, item in enumerate(path)}
    order = list(nx.topological_sort(flow))
    latest_before: dict[int, int] = {}  # the latest of the path that comes before an item
    for v in order:
        latest_before[v] = rank.get(v, max((latest_before[u] for u in flow.pred[v]), default=-1))
    earliest_after: dict[int, int] = {}
    for v in reversed(order):
        earliest_after[v] = rank.get(v, min((earliest_after[u] for u in flow.succ[v]), default=len(path)))
    slack = []
    for times in model.times:
        change = [0] * (len(path) + 2)
        for v in order:
            if v not in rank:
                change[latest_before[v] + 1] += times[v]
                change[earliest_after[v] + 1] -= times[v]
        slack.append(max(accumulate(change)))
    return slack


@dataclass(frozen=True)
class Certificate:
    """A lower bound on the step of any placement of these blocks on these stages.

    proved: whether a longer search would not raise it.
    """

    bound_ns: int
    proved: bool
    blocks: int
    stages: int

    def note(self, step_ns: int) -> str:
        """Return the note for a plan whose step takes step_ns."""
        gap = max(0.0, 1 - self.bound_ns / step_ns) if step_ns else 0.0
        blocks = f"{self.blocks} blocks" if self.blocks > 1 else "block"
        stages = f"these {self.stages} stages, in any order," if self.stages > 1 else "this stage"
        late = "" if self.proved else ", not searched to the end"
        bound = f"{self.bound_ns / 1e6:.3f} ms" if self.bound_ns >= 1000 else f"{self.bound_ns} ns"
        return f"CP-SAT: no placement of the {blocks} on {stages} takes less than {bound} (gap {gap:.1%}{late})"


def certified(evaluation: Evaluation, seconds: float) -> Certificate:
    """Return the certificate that is found within this time, the loading of the solver included.

    Before: the evaluated plan fits and its schedule is synchronous.  The same every time, unless the clock stops the
    search.  Without any time it is the bound of the relaxation, and the solver is not loaded.
    """
    started = time.monotonic()
    model = model_of(evaluation)
    blocks, stages = len(model.static_bytes), len(model.times)
    if seconds <= 0:
        bound_ns = relaxation_bound_ns(model, critical_path(model))
        return Certificate(bound_ns, False, blocks, stages)
    from autopart.passes.proof.exact import certify  # loads the solver for half a second, and few plans need it

    stage_of = {name: s for s, stage in enumerate(evaluation.decision.stages) for name in stage.ops}
    hint = [stage_of[block.name] for block in evaluation.space.chain.blocks.ops]
    left = max(0.0, seconds - (time.monotonic() - started))
    _, found = certify(model, hint, left)
    return Certificate(found.lower_bound, found.proved, blocks, stages)


def settles(request: PlanRequest, cluster: Cluster) -> bool:
    """Return whether a certificate bounds every plan of the request, which leaves only the placement of blocks open."""
    fixed = request.stages is not None and len(request.micro_rows) == 1
    return fixed and len(cluster.types) == 1 and (not request.may_replicate or request.replicas is not None)
