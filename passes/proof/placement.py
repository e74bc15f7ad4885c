"""Placement of items on machines that work in a pipeline: the slowest machine sets the pace.

minimise the largest load, where the load of a machine is

    sum of the times of its items there
    + sum of the costs of the messages that touch it and do not lie wholly in it (none where it does not pay)

subject to sizes of items <= memory of the machine, and each item only where it can run.  `contiguous`: also no flow
back, that is the machines stand in a line such that every edge goes forward or stays.

A message is a value with its writer and its readers: each machine that writes or reads it and does not hold all of
these pays its cost once (dnn-partitioning, NeurIPS 2020, section 3: transfers go through host memory).  Times and
costs are integers of one unit, so that equal plans are equal on every machine; ns where nothing else is said.

Assumed, and wrong where: no replicas; memory is static (nothing held per micro-batch in flight); all links are alike.

A synchronous pipeline (`Line`): positions 0..S-1, one stage each, work one after the other on m micro-batches.  Let L_q
be the forward and backward time of one micro-batch at q, and let the trunk be the heaviest path of the DAG over edges
that carry a gradient; b_q = 1 when q holds an item of the trunk.  Then a step takes at least

    Z = max of  m L_q + tail_q                                                       for every q
                tail_p + sum of L_r over p <= r < q with b_r = 1  +  m L_q           for p <= q with b_p = b_q = 1

whatever the schedule.  q works m L_q and then sums its gradients.  Let p < q both hold items of the trunk.  Before q
starts its first forward, that micro-batch has gone forward through each position of the trunk from p to q, for a stage
starts when all that it reads is there; after the last backward of q (its last action) that micro-batch goes back
through the same positions, and then p sums its gradients.  All of this is disjoint in time from what q does itself.
Positions without the trunk (b_q = 0) may run beside the others, which is why the plain sum over all positions before q
would claim too much for a DAG with branches.  Where every position holds an item of the trunk, Z is that sum; on a
chain it always is.  Transfers, and the idle time of a position between its first and its last action, are left out: Z
is below the true time by them.  Several stages on one position (interleaving) are not covered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import numpy.typing as npt

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Optimality

Ints = npt.NDArray[np.int64]

NEVER = 1 << 60
"""The load of what cannot be; no sum of times comes near it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """kind: row of `Problem.times`.  memory_bytes: None for no limit.  pays: messages cost it time."""

    kind: int = 0
    memory_bytes: int | None = None
    pays: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    """items: the writer first, then the readers; cost in units of time."""

    cost: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """times[kind][item]: None where the item cannot run.  sizes: bytes.  edges: (before, after), for contiguity."""

    times: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]
    messages: tuple[Message, ...]
    edges: tuple[tuple[int, int], ...]
    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """machine[item], an index of `Problem.machines`.  optimality: in the unit of the problem's loads."""

    machine: tuple[int, ...]
    optimality: Optimality


def check(problem: Problem) -> Problem:
    """The problem itself, if all its indices exist, every tuple has one entry per item and nothing is negative."""
    n = len(problem.sizes)
    touched = [i for m in problem.messages for i in m.items] + [i for edge in problem.edges for i in edge]
    kinds = {m.kind for m in problem.machines}
    if not problem.machines or any(len(row) != n for row in problem.times) or max(kinds) >= len(problem.times):
        raise UsageError("the machines or the times of a placement do not match its items")
    if any(not 0 <= i < n for i in touched):
        raise UsageError("a message or edge of a placement names an item that does not exist")
    amounts = [t for row in problem.times for t in row if t is not None] + [m.cost for m in problem.messages]
    if any(a < 0 for a in [*amounts, *problem.sizes]):
        raise UsageError("a placement has a negative time, cost or size")
    return problem


def loads(problem: Problem, where: Sequence[int]) -> tuple[int, ...]:
    """Load of each machine, in the problem's unit of time, when item i stands on machine where[i].

    NEVER where it cannot run or does not fit.
    """
    result = []
    for index, machine in enumerate(problem.machines):
        own = {i for i, place in enumerate(where) if place == index}
        times = [problem.times[machine.kind][i] for i in own]
        size = sum(problem.sizes[i] for i in own)
        if None in times or (machine.memory_bytes is not None and size > machine.memory_bytes):
            result.append(NEVER)
            continue
        cut = [m.cost for m in problem.messages if 0 < len(own.intersection(m.items)) < len(set(m.items))]
        result.append(sum(t for t in times if t is not None) + (sum(cut) if machine.pays else 0))
    return tuple(result)


def is_contiguous(problem: Problem, where: Sequence[int]) -> bool:
    """Whether the machines can stand in a line with no edge going back.  O(edges)."""
    flow = nx.DiGraph((where[u], where[v]) for u, v in problem.edges if where[u] != where[v])
    return bool(nx.is_directed_acyclic_graph(flow))


def orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Some topological orders of the items: depth first with either end of the graph first, and breadth first.

    Items on a cycle of edges stand together.  O(orders * (items + edges)).
    """
    whole = nx.DiGraph(problem.edges)
    whole.add_nodes_from(range(len(problem.sizes)))
    groups = [tuple(sorted(group)) for group in nx.strongly_connected_components(whole)]
    groups.sort()
    number = {item: g for g, group in enumerate(groups) for item in group}
    line = nx.DiGraph((number[u], number[v]) for u, v in whole.edges if number[u] != number[v])
    line.add_nodes_from(range(len(groups)))
    found = [_depth_first(line, sign) for sign in (1, -1)]
    found += [_depth_first(line.reverse(copy=False), sign)[::-1] for sign in (1, -1)]
    found.append(list(nx.lexicographical_topological_sort(line)))
    return tuple(dict.fromkeys(tuple(item for g in order for item in groups[g]) for order in found))


def _depth_first(line: nx.DiGraph, sign: int) -> list[int]:
    """Reversed postorder; sign: which child is visited first."""
    seen: set[int] = set()
    post: list[int] = []
    for root in sorted((g for g in line if line.in_degree(g) == 0), key=lambda g: sign * g):
        stack = [(root, iter(sorted(line[root], key=lambda g: sign * g)))]
        if root in seen:
            continue
        seen.add(root)
        while stack:
            g, rest = stack[-1]
            child = next((c for c in rest if c not in seen), None)
            if child is None:
                post.append(g)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(sorted(line[child], key=lambda c: sign * c))))
    return post[::-1]


def place_line(problem: Problem, order: Sequence[int]) -> Placement:
    """The best contiguous placement that cuts one given order of the items; its lower bound is 0, as others may win.

    State: how many machines of each group of equal ones are used (u), how many items of the order are placed (b).
    Recurrence: best[u, b] = min over groups g and a <= b of max(best[u - g, a], load of order[a:b] on g).
    O(product of the group sizes * groups * n^2) and O(total items of messages * n) for the loads.
    Raises InfeasibleError when nothing fits.
    """
    groups = list(Counter(problem.machines).items())
    tables = [_range_loads(problem, order, machine) for machine, _ in groups]
    best: dict[tuple[int, ...], Ints] = {}
    choice: dict[tuple[int, ...], list[tuple[int, Ints]]] = {}
    for used in product(*(range(count + 1) for _, count in groups)):
        best[used] = np.full(len(order) + 1, NEVER, dtype=np.int64)
        best[used][0], choice[used] = 0, []
        for g in (g for g, count in enumerate(used) if count):
            ways = np.maximum(best[_less(used, g)][:, None], tables[g])
            choice[used].append((g, ways.argmin(axis=0)))
            best[used] = np.minimum(best[used], ways.min(axis=0))
    used, end = tuple(count for _, count in groups), len(order)
    objective = int(best[used][end])
    if objective >= NEVER:
        raise InfeasibleError("no contiguous placement fits the memory of the machines")
    left = {g: [i for i, m in enumerate(problem.machines) if m == machine] for g, (machine, _) in enumerate(groups)}
    where = [0] * len(order)
    while end:
        value = best[used][end]
        for g, starts in choice[used]:
            start = int(starts[end])
            if max(best[_less(used, g)][start], tables[g][start, end]) == value:
                break
        machine = left[g].pop()
        for item in order[start:end]:
            where[item] = machine
        used, end = _less(used, g), start
    return Placement(tuple(where), Optimality.of(objective, 0))


def _less(used: tuple[int, ...], g: int) -> tuple[int, ...]:
    return (*used[:g], used[g] - 1, *used[g + 1 :])


def _range_loads(problem: Problem, order: Sequence[int], machine: Machine) -> Ints:
    """[a, b]: the load of order[a:b] on the machine; 0 where it is empty, NEVER where a > b or it cannot be."""
    n = len(order)
    times = [problem.times[machine.kind][i] for i in order]
    total = _ranges([t or 0 for t in times])
    if machine.pays:
        total += _cut_costs(problem, order)
    sizes = _ranges([problem.sizes[i] for i in order])
    cannot = _ranges([int(t is None) for t in times]) > 0
    if machine.memory_bytes is not None:
        cannot |= sizes > machine.memory_bytes
    return np.where(cannot | (np.arange(n + 1)[:, None] > np.arange(n + 1)[None, :]), NEVER, total)


def _ranges(amounts: Sequence[int]) -> Ints:
    sums = np.concatenate([[0], np.cumsum(np.array(amounts, dtype=np.int64))]).astype(np.int64)
    return np.asarray(sums[None, :] - sums[:, None])


def _cut_costs(problem: Problem, order: Sequence[int]) -> Ints:
    """[a, b]: costs of the messages that order[a:b] touches but does not hold.

    Per message, over the ascending places p of its items: the first touch of [a, b) is at place p_i when
    p_(i-1) < a <= p_i < b, which makes rectangles of (a, b); less the rectangle a <= p_0, p_last < b.
    """
    place = {item: p for p, item in enumerate(order)}
    n = len(order)
    corners = np.zeros((n + 2, n + 2), dtype=np.int64)
    for message in problem.messages:
        places = sorted({place[i] for i in message.items})
        before = -1
        for p in places:
            corners[before + 1, p + 1] += message.cost
            corners[p + 1, p + 1] -= message.cost
            before = p
        corners[0, places[-1] + 1] -= message.cost
        corners[places[0] + 1, places[-1] + 1] += message.cost
    return corners.cumsum(axis=0).cumsum(axis=1)[: n + 1, : n + 1]


# ---- a pipeline in a line, and what its step takes at least ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A pipeline of positions, one stage each; times in ns, sizes in bytes.

    times[q][v]: forward and backward of item v for one micro-batch at position q, over its replicas there.
    edges: a DAG over the items; none goes back.  micros: micro-batches of a step.  static_bytes[v]: weights, gradients,
    optimizer state.  live_bytes[q][v]: what v keeps per micro-batch in flight at q.  live[q]: how many are in flight.
    tail_ns[q]: what q does after its last backward (the sum of its gradients over replicas), 0 if unknown.
    one_way: those of the edges that carry no gradient back; an edge that is not named here is taken to carry one.
    """

    times: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    micros: int
    static_bytes: tuple[int, ...]
    live_bytes: tuple[tuple[int, ...], ...]
    live: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    tail_ns: tuple[int, ...]
    one_way: tuple[tuple[int, int], ...] = ()

    def need_bytes(self, q: int, v: int) -> int:
        """Bytes that item v takes at position q."""
        return self.static_bytes[v] + self.live[q] * self.live_bytes[q][v]


def least_ns(line: PipelineModel, where: Sequence[int]) -> int:
    """Z of one pipeline, in nanoseconds: no schedule of it takes less.  Raises UsageError when it is none.

    O(items + S^2).
    """
    spots = range(len(line.times))
    back = any(where[u] > where[v] for u, v in line.edges)
    need = [sum(line.need_bytes(q, v) for v, at in enumerate(where) if at == q) for q in spots]
    if set(where) != set(spots) or len(where) != len(line.static_bytes) or back:
        raise UsageError("this is no pipeline that may be", why="an edge goes back, or a position is empty")
    if any(n > memory for n, memory in zip(need, line.memory_bytes, strict=True)):
        raise UsageError("this is no pipeline that may be", why="a position has too little memory")
    times = [sum(line.times[q][v] for v, at in enumerate(where) if at == q) for q in spots]
    least = max(line.micros * t + tail for t, tail in zip(times, line.tail_ns, strict=True))
    on = sorted({where[v] for v in critical_path(line)})
    for i, p in enumerate(on):
        for j in range(i, len(on)):
            least = max(least, line.tail_ns[p] + sum(times[r] for r in on[i:j]) + line.micros * times[on[j]])
    return least


def ceiling_ns(line: PipelineModel) -> int:
    """Nanoseconds that no Z is above."""
    slowest: list[int] = [max(ways) for ways in zip(*line.times, strict=True)]
    return line.micros * sum(slowest) + max(line.tail_ns)


def relaxation_bound_ns(line: PipelineModel, path: Sequence[int]) -> int:
    """Nanoseconds that no Z is below: what the relaxation says without a solver.  path: the trunk."""
    least: list[int] = [min(ways) for ways in zip(*line.times, strict=True)]
    m, spots = line.micros, len(line.times)
    whole: int = m**spots
    less: int = (m - 1) ** spots
    along = sum(least[v] for v in path) * whole
    return max(-(-along // (whole - less)), -(-m * sum(least) // spots), m * max(least))


def critical_path(line: PipelineModel) -> tuple[int, ...]:
    """The heaviest path over edges that carry a gradient.  Refuses a line that contradicts itself.  O(n + edges)."""
    n, spots = len(line.static_bytes), len(line.times)
    tables = (line.live_bytes, line.live, line.memory_bytes, line.tail_ns)
    rows = [*line.times, *line.live_bytes]
    if not n or line.micros < 1 or any(len(t) != spots for t in tables) or any(len(row) != n for row in rows):
        raise UsageError("the parts of a line do not match")
    if any(a < 0 for row in [*rows, line.static_bytes, line.live, line.tail_ns] for a in row):
        raise UsageError("a line has a negative time or size")
    if any(not 0 <= i < n for edge in line.edges for i in edge):
        raise UsageError("an edge of a line names an item that does not exist")
    flow = _flow(line)
    if not nx.is_directed_acyclic_graph(flow):
        raise UsageError("the edges of a line make a cycle")
    flow.remove_edges_from(line.one_way)
    best: dict[int, tuple[int, int]] = {}  # time of the heaviest path that ends here, and the item before
    for v in nx.topological_sort(flow):
        before = max(((best[u][0], -u) for u in flow.pred[v]), default=(0, 1))
        best[v] = (before[0] + min(row[v] for row in line.times), -before[1])
    path = [max(range(n), key=lambda v: (best[v][0], -v))]
    while best[path[-1]][1] >= 0:
        path.append(best[path[-1]][1])
    return tuple(reversed(path))


def _flow(line: PipelineModel) -> nx.DiGraph:
    flow = nx.DiGraph(line.edges)
    flow.add_nodes_from(range(len(line.static_bytes)))
    return flow


def beside_ns(line: PipelineModel, path: Sequence[int]) -> list[int]:
    """o: the most nanoseconds a position can have that holds no item of the trunk.

    Then all positions before it end the trunk after some item i, and what stands there can be neither before i (or it)
    nor after what follows i.  O(items + edges).
    """
    flow, rank = _flow(line), {v: i for i, v in enumerate(path)}
    order = list(nx.topological_sort(flow))
    first: dict[int, int] = {}  # the latest of the trunk before an item
    last: dict[int, int] = {}  # the earliest after it
    for v in order:
        first[v] = rank.get(v, max((first[u] for u in flow.pred[v]), default=-1))
    for v in reversed(order):
        last[v] = rank.get(v, min((last[u] for u in flow.succ[v]), default=len(path)))
    result = []
    for row in line.times:
        change = [0] * (len(path) + 2)
        for v in order:
            if v not in rank:
                change[first[v] + 1] += row[v]
                change[last[v] + 1] -= row[v]
        result.append(max(accumulate(change)))
    return result
