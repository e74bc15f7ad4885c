"""Places where a DAG can be cut: its downsets, as bit masks.

A downset contains all predecessors of its nodes. A stage of a pipeline is the difference of two downsets, so a chain of
downsets is a pipeline. Node v is bit v of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopart.ir.errors import UsageError

Parents = Sequence[Sequence[int]]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class States:
    """The cuts that PipeDream considers, in a topological order: the smaller of two nested cuts comes first.

    inside: the downset of each state; alive: the nodes its cut is charged for (`cut_states`).
    """

    inside: tuple[int, ...]
    alive: tuple[int, ...]


def cut_states(parents: Parents, *, limit: int = 60_000) -> States:
    """Return the states that PipeDream reaches from the first source by adding a child of an alive node with its
    ancestors.

    Alive at a state are its maximal nodes and, for each of them, every ancestor with a child that is neither an
    ancestor of it nor itself. That counts a node whose other readers are in another branch of the same downset, which
    is kept because it is the published cost model (SOSP 2019, section 3.1; `augment_antichain` in its code). O(states *
    (nodes + children)). Raises UsageError beyond the limit.
    """
    children, above = _children(parents), _ancestors(parents)
    open_above = [_open(v, above[v], children) for v in range(len(parents))]
    source = next(v for v, before in enumerate(parents) if not before)
    alive: dict[int, int] = {}
    todo = [1 << source]
    while todo:
        inside = todo.pop()
        if inside in alive:
            continue
        if len(alive) >= limit:
            raise UsageError(f"the graph has more than {limit} cuts", fix="plan over one topological order")
        alive[inside] = now = _alive(inside, children, open_above)
        for v in members(now):
            todo += [inside | above[w] | 1 << w for w in children[v] if not inside >> w & 1]
    ordered = sorted(alive, key=lambda mask: (mask.bit_count(), mask))
    return States(tuple(ordered), tuple(alive[mask] for mask in ordered))


def downsets(parents: Parents, *, limit: int = 60_000) -> tuple[int, ...]:
    """Return all downsets, the empty one first, the smaller of two nested ones first. O(downsets * nodes)."""
    needs = [sum(1 << p for p in before) for before in parents]
    found = {0}
    todo = [0]
    while todo:
        inside = todo.pop()
        for v, need in enumerate(needs):
            grown = inside | 1 << v
            if grown != inside and need & inside == need and grown not in found:
                if len(found) >= limit:
                    raise UsageError(f"the graph has more than {limit} downsets", fix="plan over one topological order")
                found.add(grown)
                todo.append(grown)
    return tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))


def members(mask: int) -> list[int]:
    """Return the nodes of a mask, ascending."""
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def table(masks: Sequence[int], nodes: int) -> Bools:
    """Return a table with one row per mask and one column per node."""
    return np.array([[mask >> v & 1 for v in range(nodes)] for mask in masks], dtype=np.bool_).reshape(-1, nodes)


def nested(inside: Bools) -> Bools:
    """Return [k, j], whether downset k is a proper subset of downset j. O(states^2 * nodes)."""
    count = inside.astype(np.float32)
    outside = count @ (1 - count).T
    return np.asarray((outside == 0) & (outside.T > 0))


def _children(parents: Parents) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for v, before in enumerate(parents):
        for p in dict.fromkeys(before):
            children[p].append(v)
    return children


def _ancestors(parents: Parents) -> list[int]:
    above = [0] * len(parents)
    waiting = [len(set(before)) for before in parents]
    ready = [v for v, count in enumerate(waiting) if not count]
    children = _children(parents)
    for v in ready:  # the list grows during the loop
        for c in children[v]:
            above[c] |= above[v] | 1 << v
            waiting[c] -= 1
            if not waiting[c]:
                ready.append(c)
    if len(ready) < len(parents):
        raise UsageError("the graph has a cycle")
    return above


def _open(v: int, above: int, children: list[list[int]]) -> int:
    """Return v and its ancestors with a child that is neither v nor an ancestor of v."""
    near = above | 1 << v
    return 1 << v | sum(1 << p for p in members(above) if any(not near >> c & 1 for c in children[p]))


def _alive(inside: int, children: list[list[int]], open_above: list[int]) -> int:
    alive = 0
    for v in members(inside):
        if not any(inside >> c & 1 for c in children[v]):
            alive |= open_above[v]
    return alive
