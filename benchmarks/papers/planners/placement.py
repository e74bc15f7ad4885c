"""Placement of items on machines that work in a pipeline: the slowest machine sets the pace.

Minimise the largest load, where the load of a machine is

    sum of the times of its items there
    + sum of the costs of the messages that touch it and are not entirely inside it (0 if it does not pay)

subject to sizes of items <= memory of the machine, and each item only where it can run.  `contiguous`: also no
backward flow: the machines can be ordered such that every edge goes forward or stays.

A message is a value with its writer and its readers: each machine that writes or reads it and does not hold all of
these pays its cost once (dnn-partitioning, NeurIPS 2020, section 3: transfers go through host memory).  Times and
costs are integers of one unit, so that results do not depend on the machine; ns by default.

Assumptions and their limits: no replicas; memory is static (nothing is held per micro-batch in flight); all links are
equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import networkx as nx  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import numpy.typing as npt

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Optimality

Ints = npt.NDArray[np.int64]

NEVER = 1 << 60
"""The load of an impossible placement, larger than any sum of times."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. kind: row of `Problem.times`; memory_bytes: None for no limit; pays: whether messages cost it time."""

    kind: int = 0
    memory_bytes: int | None = None
    pays: bool = True


@dataclass(frozen=True, slots=True)
class Message:
    """A message. items: the writer first, then the readers; cost: in units of time."""

    cost: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A placement problem.

    times[kind][item]: None where the item cannot run; sizes: bytes; edges: (before, after), for contiguity.
    """

    times: tuple[tuple[int | None, ...], ...]
    sizes: tuple[int, ...]
    messages: tuple[Message, ...]
    edges: tuple[tuple[int, int], ...]
    machines: tuple[Machine, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement. machine[item]: index into `Problem.machines`; optimality: in the unit of the problem's loads."""

    machine: tuple[int, ...]
    optimality: Optimality


def check(problem: Problem) -> Problem:
    """Return the problem if all indices exist, every tuple has one entry per item and nothing is negative."""
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


def loads(problem: Problem, machine_of: Sequence[int]) -> tuple[int, ...]:
    """Return the load of each machine when item i is on machine machine_of[i], NEVER if an item cannot run or fit."""
    result = []
    for index, machine in enumerate(problem.machines):
        own = {i for i, stands_on in enumerate(machine_of) if stands_on == index}
        times = [problem.times[machine.kind][i] for i in own]
        size = sum(problem.sizes[i] for i in own)
        if None in times or (machine.memory_bytes is not None and size > machine.memory_bytes):
            result.append(NEVER)
            continue
        cut = [m.cost for m in problem.messages if 0 < len(own.intersection(m.items)) < len(set(m.items))]
        messages = sum(cut) if machine.pays else 0
        result.append(sum(t for t in times if t is not None) + messages)
    return tuple(result)


def is_contiguous(problem: Problem, machine_of: Sequence[int]) -> bool:
    """Return whether the machines can be ordered without a backward edge. O(edges)."""
    flow = nx.DiGraph((machine_of[u], machine_of[v]) for u, v in problem.edges if machine_of[u] != machine_of[v])
    return bool(nx.is_directed_acyclic_graph(flow))


def topological_orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return some topological orders of the items: depth first with either end of the graph first, and breadth first.

    Items on a cycle of edges are adjacent. O(orders * (items + edges)).
    """
    whole = nx.DiGraph(problem.edges)
    whole.add_nodes_from(range(len(problem.sizes)))
    groups = [tuple(sorted(group)) for group in nx.strongly_connected_components(whole)]
    groups.sort()
    number = {item: g for g, group in enumerate(groups) for item in group}
    quotient = nx.DiGraph((number[u], number[v]) for u, v in whole.edges if number[u] != number[v])
    quotient.add_nodes_from(range(len(groups)))
    found = [_depth_first(quotient, sign) for sign in (1, -1)]
    found += [_depth_first(quotient.reverse(copy=False), sign)[::-1] for sign in (1, -1)]
    found.append(list(nx.lexicographical_topological_sort(quotient)))
    return tuple(dict.fromkeys(tuple(item for g in order for item in groups[g]) for order in found))


def _depth_first(graph: nx.DiGraph, sign: int) -> list[int]:
    """Return the reversed postorder. sign: which child is visited first."""
    seen: set[int] = set()
    post: list[int] = []
    for root in sorted((g for g in graph if graph.in_degree(g) == 0), key=lambda g: sign * g):
        stack = [(root, iter(sorted(graph[root], key=lambda g: sign * g)))]
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
                stack.append((child, iter(sorted(graph[child], key=lambda c: sign * c))))
    return post[::-1]


def place_in_order(problem: Problem, order: Sequence[int]) -> Placement:
    """Return the best contiguous placement that cuts one given order of the items, with lower bound 0.

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
        best[used][0] = 0
        choice[used] = []
        for g, count in enumerate(used):
            if not count:
                continue
            ways = np.maximum(best[_less(used, g)][:, None], tables[g])
            choice[used].append((g, ways.argmin(axis=0)))
            best[used] = np.minimum(best[used], ways.min(axis=0))
    used, end = tuple(count for _, count in groups), len(order)
    objective = int(best[used][end])
    if objective >= NEVER:
        raise InfeasibleError("no contiguous placement fits the memory of the machines")
    left = {g: [i for i, m in enumerate(problem.machines) if m == machine] for g, (machine, _) in enumerate(groups)}
    machine_of = [0] * len(order)
    while end:
        value = best[used][end]
        for g, starts in choice[used]:
            start = int(starts[end])
            if max(best[_less(used, g)][start], tables[g][start, end]) == value:
                break
        machine = left[g].pop()
        for item in order[start:end]:
            machine_of[item] = machine
        used, end = _less(used, g), start
    return Placement(tuple(machine_of), Optimality.of(objective, 0))


def _less(used: tuple[int, ...], g: int) -> tuple[int, ...]:
    return (*used[:g], used[g] - 1, *used[g + 1 :])


def _range_loads(problem: Problem, order: Sequence[int], machine: Machine) -> Ints:
    """Return [a, b], the load of order[a:b] on the machine: 0 if empty, NEVER if a > b or impossible."""
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
    """Return [a, b], the costs of the messages that order[a:b] touches without containing them.

    Per message, over the ascending places p of its items: the first touch of [a, b) is at place p_i when p_(i-1) < a <=
    p_i < b, which makes rectangles of (a, b); less the rectangle a <= p_0, p_last < b.
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
