"""Coarsening: a chain of at most `blocks` blocks, each a convex part of the graph.

Two steps after RaNNC (IPDPS 2021, block-level partitioning), changed where noted:

1. Clustering, multilevel: match neighbours where a cut would be expensive, contract, repeat.  RaNNC profiles every
   merge and searches each edge for a second path; here costs are added up, and three local rules exclude such a path.
2. Compaction: the clusters in a row; boundaries are removed in order of the bytes that cross them.  RaNNC merges the
   lightest block first, whatever crosses its boundaries.

Assumed: the time of a block is the sum of its ops (wrong where kernels overlap).  Time and bytes of a block are capped
at total / blocks, and more only where necessary, so that stages can be balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile

import networkx as nx  # type: ignore[import-untyped, unused-ignore]

from autopart.ir.errors import UsageError
from autopart.ir.graph import Cost, Graph, Op
from autopart.passes.graph.cuts import Ints, crossing_bytes, flows, segments


def coarsen(graph: Graph, *, blocks: int = 64, cuts: tuple[str, ...] = (), also: tuple[int, ...] = ()) -> Graph:
    """Merge ops into at most `blocks` blocks; more where `cuts` makes more segments.

    Before: a checked graph.  After: ops are blocks named block0, block1, ... in topological order; every block is
    convex and the graph between them acyclic; `parts` lists the captured ops inside in an order that can run; a
    value used only inside a block is dropped unless it is an output or an update; cost is the sum; no block spans a cut
    (`cuts.segments`) or a place in `also`; all uses of an updated buffer are in one block, since each stage has its own
    copy.  O(levels * (ops + reads) * log ops), levels about log2(ops / blocks).
    """
    return merge(graph, _groups(graph, blocks, segments(graph, cuts, also)))


def nested(graph: Graph, *, blocks: int, also: tuple[int, ...] = ()) -> tuple[Graph, Graph]:
    """The graph coarsened, and the graph with its ops ordered so that each block is a range of them."""
    groups = _groups(graph, blocks, segments(graph, (), also))
    return merge(graph, groups), replace(graph, ops=tuple(graph.ops[i] for group in groups for i in group))


def _groups(graph: Graph, blocks: int, segment: list[int]) -> list[list[int]]:
    """The places of the ops of each block, in an order that can run."""
    if len(graph.ops) <= blocks:
        return _compact(graph, segment, blocks)
    clusters = _cluster(graph, segment, blocks)
    in_row = merge(graph, clusters)
    ranges = _compact(in_row, [segment[cluster[0]] for cluster in clusters], blocks)
    return [[i for place in group for i in clusters[place]] for group in ranges]


# ---- step 1: clustering ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Level:
    """Clusters in topological order.  flows: (writer, its readers ascending, bytes both ways) of each value."""

    members: list[list[int]]
    time_ns: list[int]
    held_bytes: list[int]
    segment: list[int]
    flows: list[tuple[int, tuple[int, ...], int]]


def _cluster(graph: Graph, segment: list[int], blocks: int) -> list[list[int]]:
    """Groups of op places, in topological order of the graph between the groups."""
    time_ns, held_bytes = _weights(graph)
    between = [(place, tuple(reads), size + grad) for place, reads, size, grad, made in flows(graph) if made]
    level = _Level([[i] for i in range(len(graph.ops))], time_ns, held_bytes, segment, between)
    caps = sum(time_ns) // blocks, sum(held_bytes) // blocks
    while len(level.members) > blocks:
        mate = _match(level, caps, len(level.members) - blocks)
        coarser = _contract(level, mate)
        done = len(coarser.members) * 50 > len(level.members) * 49  # under 2 % a level: leave the rest to step 2
        level = coarser
        if done:
            break
    return level.members


def _weights(graph: Graph) -> tuple[list[int], list[int]]:
    """(nanoseconds, bytes of parameters and saved tensors) of each op; a tied parameter counts at each use."""
    size = {p.name: p.size_bytes for p in graph.params}
    held = [op.cost.saved_bytes + sum(size[p] for p in op.params) for op in graph.ops]
    return [op.cost.total_ns for op in graph.ops], held


def _match(level: _Level, caps: tuple[int, int], most: int) -> dict[int, int]:
    """At most `most` disjoint pairs of neighbours to contract, as a map in both directions.

    Light clusters choose first.  The gain of a pair is the bytes that only the other one reads: expensive cuts
    disappear, and cheap ones (a residual stream that is read again later) stay.  An edge u -> v has no second path
    beside it when only v reads u, or v reads only u, or v lies one level deeper.  Several pairs can still close a
    cycle; `_contract` undoes those.
    """
    n = len(level.members)
    after: list[dict[int, int]] = [{} for _ in range(n)]  # after[u][v]: bytes of u that v alone reads
    before: list[set[int]] = [set() for _ in range(n)]
    for writer, readers, size in level.flows:
        for reader in readers:
            after[writer][reader] = after[writer].get(reader, 0) + (size if len(readers) == 1 else 0)
            before[reader].add(writer)
    depth = [0] * n
    for v in range(n):
        depth[v] = 1 + max((depth[u] for u in before[v]), default=-1)

    def gain(u: int, v: int) -> int:
        alone = len(after[u]) == 1 or len(before[v]) == 1 or depth[v] == depth[u] + 1
        fits = (
            level.segment[u] == level.segment[v]
            and level.time_ns[u] + level.time_ns[v] <= caps[0]
            and level.held_bytes[u] + level.held_bytes[v] <= caps[1]
        )
        return after[u][v] if alone and fits else 0

    mate: dict[int, int] = {}
    for u in sorted(range(n), key=lambda i: (level.time_ns[i], i)):
        if u in mate:
            continue
        near = [(gain(u, v), -level.time_ns[v], -v) for v in after[u] if v not in mate]
        near += [(gain(v, u), -level.time_ns[v], -v) for v in before[u] if v not in mate]
        best = max(near, default=(0, 0, 0))
        if best[0] > 0:
            partner = -best[2]
            mate[u] = partner
            mate[partner] = u
            most -= 1
        if most <= 0:
            break
    return mate


def _contract(level: _Level, mate: dict[int, int]) -> _Level:
    """Contract the pairs that lie on no cycle; clusters come out in topological order.

    Splitting every pair on a cycle removes all cycles: one that remained would consist of unpaired clusters alone.
    """
    into = [min(u, mate.get(u, u)) for u in range(len(level.members))]
    for component in nx.strongly_connected_components(_quotient(level, into)):
        if len(component) > 1:
            for u in component & mate.keys():
                into[mate[u]] = mate[u]
    joined: dict[int, list[int]] = {}
    for u, target in enumerate(into):
        joined.setdefault(target, []).append(u)

    def key(target: int) -> tuple[int, int]:
        return level.segment[target], max(level.members[u][-1] for u in joined[target])

    order = list(nx.lexicographical_topological_sort(_quotient(level, into), key=key))
    place = {target: i for i, target in enumerate(order)}
    across = []
    for writer, readers, size in level.flows:
        source = place[into[writer]]
        rest = sorted({place[into[r]] for r in readers} - {source})
        if rest:
            across.append((source, tuple(rest), size))
    return _Level(
        [sorted(m for u in joined[t] for m in level.members[u]) for t in order],
        [sum(level.time_ns[u] for u in joined[t]) for t in order],
        [sum(level.held_bytes[u] for u in joined[t]) for t in order],
        [level.segment[t] for t in order],
        across,
    )


def _quotient(level: _Level, into: list[int]) -> nx.DiGraph:
    quotient = nx.DiGraph()
    quotient.add_nodes_from(into)
    quotient.add_edges_from(
        (into[writer], into[r]) for writer, readers, _ in level.flows for r in readers if into[writer] != into[r]
    )
    return quotient


# ---- step 2: compaction ------------------------------------------------------------------------------------------


def _compact(graph: Graph, segment: list[int], blocks: int) -> list[list[int]]:
    """Intervals of places, which are convex as the order is topological.  O(n log n).

    Boundaries with the most bytes across are removed first, under caps that grow as long as too many are left; the
    cheapest stay.  Caps of 8 * total / blocks always suffice, since two neighbours that stay apart exceed a cap
    together unless the cheapest cut lies between them; a single heavy op may exceed them.
    """
    n = len(graph.ops)
    time_sum, held_sum = ([0, *accumulate(weights)] for weights in _weights(graph))
    crossing = crossing_bytes(graph)
    begin = list(range(-1, n))  # begin[b]: where the block before boundary b starts
    end = list(range(1, n + 2))  # end[b]: where the block after it ends

    def remove(b: int) -> None:
        before, after = begin[b], end[b]
        begin[after] = before
        end[before] = after

    glued = _glued(graph, segment)
    for b in sorted(glued):
        remove(b)
    left = [b for b in range(1, n) if b not in glued and segment[b] == segment[b - 1]]
    between_segments = [b for b in range(1, n) if segment[b] != segment[b - 1]]
    fixed = len(between_segments)
    left.sort(key=lambda b: (-crossing[b], time_sum[b + 1] - time_sum[b - 1], b))
    kept = _cheapest(left, crossing, (blocks - fixed) // 2)
    left = [b for b in left if b not in kept]
    caps = [time_sum[n] / blocks, held_sum[n] / blocks]
    fixed += len(kept)
    while left and len(left) + fixed + 1 > blocks:
        rest = []
        excess = len(left) + fixed + 1 - blocks
        for b in left:
            low, high = begin[b], end[b]
            fits = time_sum[high] - time_sum[low] <= caps[0] and held_sum[high] - held_sum[low] <= caps[1]
            if excess > 0 and fits:
                remove(b)
                excess -= 1
            else:
                rest.append(b)
        left = rest
        caps = [cap * 1.25 for cap in caps]
    bounds = sorted({0, n, *left, *kept, *between_segments})
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def _cheapest(bounds: list[int], crossing: Ints, most: int) -> set[int]:
    """At most `most` boundaries that the fewest bytes cross; of equal ones an even spread.

    Under tight caps only light ops could merge, and they often lie at the cheapest cuts.
    """
    ranked = sorted(bounds, key=lambda b: (crossing[b], b))
    if most <= 0 or len(ranked) <= most:
        return set(ranked[: max(0, most)])
    limit = crossing[ranked[most]]
    below = [b for b in ranked if crossing[b] < limit]
    equal = [b for b in ranked if crossing[b] == limit]
    wanted = most - len(below)
    return {*below, *(equal[i * len(equal) // wanted] for i in range(wanted))}


def _glued(graph: Graph, segment: list[int]) -> set[int]:
    """Boundaries that would separate the uses of an updated buffer, or a use and its update."""
    writer = {w: i for i, op in enumerate(graph.ops) for w in op.writes}
    owner = {p.name: p.same_as or p.name for p in graph.params}
    glued: set[int] = set()
    for buffer, value in graph.updates:
        places = [i for i, op in enumerate(graph.ops) if owner[buffer] in op.params or buffer in op.params]
        if value in writer:
            places.append(writer[value])
        if not places:
            continue
        low, high = min(places), max(places)
        if segment[low] != segment[high]:
            raise UsageError(
                f"a cut separates the uses of buffer {buffer} from its update",
                where=f"between {graph.ops[low].module or graph.ops[low].name} and {graph.ops[high].module}",
                why="a stage updates its own copy of a buffer; another stage would read a stale one",
                fix="move the cut before or after all uses of the buffer",
            )
        glued.update(range(low + 1, high + 1))
    return glued


# ---- both steps ---------------------------------------------------------------------------------------------------


def merge(graph: Graph, groups: Sequence[Sequence[int]]) -> Graph:
    """Merge each group of op places into one block; the groups can run in this order.  O(ops + reads)."""
    group_of = {place: g for g, group in enumerate(groups) for place in group}
    writer = {w: group_of[i] for i, op in enumerate(graph.ops) for w in op.writes}
    kept = {*graph.inputs, *graph.outputs, *(value for _, value in graph.updates)}
    for i, op in enumerate(graph.ops):
        kept.update(r for r in op.reads if writer.get(r) != group_of[i])
    ops = tuple(_block(f"block{g}", [graph.ops[i] for i in group], kept) for g, group in enumerate(groups))
    return replace(graph, ops=ops, values=tuple(v for v in graph.values if v.name in kept))


def _block(name: str, ops: list[Op], kept: set[str]) -> Op:
    inside = {w for op in ops for w in op.writes}
    levels = zip(*(op.module.split(".") for op in ops), strict=False)
    common = takewhile(lambda level: len(set(level)) == 1, levels)  # the longest module path that all ops lie in
    return Op(
        name=name,
        target="block",
        reads=tuple(dict.fromkeys(r for op in ops for r in op.reads if r not in inside)),
        writes=tuple(w for op in ops for w in op.writes if w in kept),
        params=tuple(dict.fromkeys(p for op in ops for p in op.params)),
        module=".".join(level[0] for level in common),
        where=ops[0].where,
        random=any(op.random for op in ops),
        parts=tuple(dict.fromkeys(part for op in ops for part in op.parts or (op.name,))),
        cost=sum((op.cost for op in ops), Cost()),
    )
