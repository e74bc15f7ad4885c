"""A lower bound on the step of a synchronous pipeline under any schedule.

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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx  # type: ignore[import-untyped, unused-ignore]

from autopart.ir.graph import Graph, Size
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, in_flight
from autopart.passes.search.evaluation import Evaluation
from autopart.passes.search.space import SearchSpace


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
        places = enumerate(costs.device_types.index(costs.cluster.devices[rank]) for rank in stage.ranks)
        parts = {(kind, stage.division.part(max(plan.micro_rows), replica)) for replica, kind in places}
        of_types = [_block_costs(space, rows, device_type) for device_type, rows in sorted(parts)]
        times.append(max((times_ns for times_ns, _ in of_types), key=sum))  # of unlike replicas, the slowest's alone
        live_bytes.append((0,) * len(blocks.ops) if request.may_recompute or request.recomputed else of_types[0][1])
    edges = _edges(blocks)
    owners = max(len(stage.ranks) for stage in plan.stages) if request.may_shard else 1
    return PipelineModel(
        times=tuple(times),
        edges=tuple(edges),
        micros=micros,
        static_bytes=_static_bytes(blocks, costs.state_factor / owners),
        live_bytes=tuple(live_bytes),
        live=tuple(
            min(in_flight(find(name), s, Shape(count, micros)) for name in request.schedules) for s in range(count)
        ),
        memory_bytes=tuple(costs.cluster.least_memory_bytes(stage.ranks) for stage in plan.stages),
        forward_only=tuple(edge for edge, has_gradient in edges.items() if not has_gradient),
    )


def _block_costs(space: SearchSpace, rows: int, device_type: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (forward and backward, saved bytes) of each block."""
    costs = [op.cost for op in space.chain.graph(Size(rows), device_type).ops]
    return tuple(cost.total_ns for cost in costs), tuple(cost.saved_bytes for cost in costs)


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


def _static_bytes(blocks: Graph, state_factor: float) -> tuple[int, ...]:
    """Return the bytes of weights, gradients and optimizer state of parameters that only one block uses, by block."""
    users = Counter(name for op in blocks.ops for name in set(op.params))
    need = {}
    for param in blocks.params:
        training_bytes = param.size_bytes + int(param.size_bytes * state_factor) if param.trainable else 0
        need[param.name] = param.size_bytes + training_bytes
    return tuple(sum(need[name] for name in set(op.params) if users[name] == 1) for op in blocks.ops)


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
    time: dict[int, int] = {}  # of the heaviest path that ends at an item
    before: dict[int, int | None] = {}  # the item before it on that path
    for item in nx.topological_sort(flow):
        before[item] = max(flow.pred[item], key=lambda u: (time[u], -u), default=None)
        last = before[item]
        time[item] = (0 if last is None else time[last]) + min(row[item] for row in model.times)
    path: list[int] = []
    here: int | None = max(time, key=lambda v: (time[v], -v))
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
