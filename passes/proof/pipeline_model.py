"""A synchronous pipeline, and what its step takes at least, whatever the schedule.

Positions 0..S-1, one stage each, work one after the other on m micro-batches.  Let L_q be the forward and backward
time of one micro-batch at q, and let the critical path be the heaviest path of the DAG over edges that carry a
gradient; b_q = 1 when q holds an item of it.  Then a step takes at least

    Z = max of  m L_q + tail_q                                                       for every q
                tail_p + sum of L_r over p <= r < q with b_r = 1  +  m L_q           for p <= q with b_p = b_q = 1

whatever the schedule.  q works m L_q and then sums its gradients.  Let p < q both hold items of the critical path.
Before q starts its first forward, that micro-batch has gone forward through each position of the path from p to q, for
a stage starts when all that it reads is there; after the last backward of q (its last action) that micro-batch goes
back through the same positions, and then p sums its gradients.  All of this is disjoint in time from what q does
itself.  Positions off the critical path (b_q = 0) may run beside the others, which is why the plain sum over all
positions before q would claim too much for a DAG with branches.  Where every position holds an item of the path, Z is
that sum; on a chain it always is.  Transfers, and the idle time of a position between its first and its last action,
are left out: Z is below the true time by them.  Several stages on one position (interleaving) are not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx  # type: ignore[import-untyped, unused-ignore]

from autopart.ir.errors import UsageError


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A pipeline of positions, one stage each; times in ns, sizes in bytes.

    times[q][v]: forward and backward of item v for one micro-batch at position q, over its replicas there.
    edges: a DAG over the items; none goes back.  micros: micro-batches of a step.  static_bytes[v]: weights, gradients,
    optimizer state.  live_bytes[q][v]: what v keeps per micro-batch in flight at q.  live[q]: how many are in flight.
    tail_ns[q]: what q does after its last backward (the sum of its gradients over replicas), 0 if unknown.
    forward_only: those of the edges that carry no gradient back; an edge that is not named here carries one.
    """

    times: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    micros: int
    static_bytes: tuple[int, ...]
    live_bytes: tuple[tuple[int, ...], ...]
    live: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    tail_ns: tuple[int, ...]
    forward_only: tuple[tuple[int, int], ...] = ()

    def need_bytes(self, position: int, item: int) -> int:
        """Bytes that an item takes at a position."""
        return self.static_bytes[item] + self.live[position] * self.live_bytes[position][item]


def lower_bound_ns(model: PipelineModel, position_of: Sequence[int]) -> int:
    """Z of one pipeline, in nanoseconds: no schedule of it takes less.  position_of: of each item.

    Raises UsageError when an edge goes back, a position is empty or has too little memory.  O(items + S^2).
    """
    positions = range(len(model.times))
    _check_positions(model, position_of)
    times = [0 for _ in positions]
    for item, q in enumerate(position_of):
        times[q] += model.times[q][item]
    bound = max(model.micros * time + tail for time, tail in zip(times, model.tail_ns, strict=True))
    on_path = sorted({position_of[item] for item in critical_path(model)})
    for i, p in enumerate(on_path):
        for j in range(i, len(on_path)):
            filling = sum(times[r] for r in on_path[i:j])
            bound = max(bound, model.tail_ns[p] + filling + model.micros * times[on_path[j]])
    return bound


def _check_positions(model: PipelineModel, position_of: Sequence[int]) -> None:
    problem = "these positions do not make a pipeline"
    positions = range(len(model.times))
    goes_back = any(position_of[u] > position_of[v] for u, v in model.edges)
    if goes_back or set(position_of) != set(positions) or len(position_of) != len(model.static_bytes):
        raise UsageError(problem, why="an edge goes back, or a position is empty")
    need = [0 for _ in positions]
    for item, q in enumerate(position_of):
        need[q] += model.need_bytes(q, item)
    if any(size > memory for size, memory in zip(need, model.memory_bytes, strict=True)):
        raise UsageError(problem, why="a position has too little memory")


def upper_bound_ns(model: PipelineModel) -> int:
    """Nanoseconds that no Z is above."""
    slowest: list[int] = [max(times) for times in zip(*model.times, strict=True)]
    return model.micros * sum(slowest) + max(model.tail_ns)


def relaxation_bound_ns(model: PipelineModel, path: Sequence[int]) -> int:
    """Nanoseconds that no Z is below: what the relaxation says without a solver.  path: the critical one."""
    fastest: list[int] = [min(times) for times in zip(*model.times, strict=True)]
    micros, positions = model.micros, len(model.times)
    filled: int = micros**positions
    unfilled: int = (micros - 1) ** positions
    along_path = _divide_up(sum(fastest[item] for item in path) * filled, filled - unfilled)
    shared_work = _divide_up(micros * sum(fastest), positions)
    return max(along_path, shared_work, micros * max(fastest))


def _divide_up(amount: int, by: int) -> int:
    return -(-amount // by)


def critical_path(model: PipelineModel) -> tuple[int, ...]:
    """The heaviest path over edges that carry a gradient.

    Raises UsageError for a model that contradicts itself.  O(items + edges).
    """
    _check_model(model)
    flow = _flow(model)
    if not nx.is_directed_acyclic_graph(flow):
        raise UsageError("the edges of a pipeline make a cycle")
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


def _check_model(model: PipelineModel) -> None:
    items, positions = len(model.static_bytes), len(model.times)
    by_position = (model.live_bytes, model.live, model.memory_bytes, model.tail_ns)
    by_item = [*model.times, *model.live_bytes]
    lengths_match = all(len(t) == positions for t in by_position) and all(len(row) == items for row in by_item)
    if not items or model.micros < 1 or not lengths_match:
        raise UsageError("the parts of a pipeline do not match")
    if any(amount < 0 for row in [*by_item, model.static_bytes, model.live, model.tail_ns] for amount in row):
        raise UsageError("a pipeline has a negative time or size")
    if any(not 0 <= item < items for edge in model.edges for item in edge):
        raise UsageError("an edge of a pipeline names an item that does not exist")


def _flow(model: PipelineModel) -> nx.DiGraph:
    flow = nx.DiGraph(model.edges)
    flow.add_nodes_from(range(len(model.static_bytes)))
    return flow


def off_path_slack_ns(model: PipelineModel, path: Sequence[int]) -> list[int]:
    """For each position the most nanoseconds that it can have when it holds no item of the critical path.

    Then all positions before it end the path after some item i, and what stands there can be neither before i (or it)
    nor after what follows i.  O(items + edges).
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
