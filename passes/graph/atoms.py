"""Atoms: the ops that a cut may fall between, each with the free ops that it needs.

A free op is cloned into every stage that needs it, because computing its values there is cheaper than sending them:
attention masks, position ids, RoPE tables, views of buffers.  What this assumes and where it is wrong: bytes alone
decide between sending and computing, each message is thought to cross one link, and the time of a clone is charged to
the first atom that needs it, so that the atoms' times add up to the graph's; a later stage runs its copies unpaid
(they are cheap by definition; `estimate` counts them exactly).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopart.ir.cost import Cost
from autopart.ir.graph import Graph, Op

HEAVY_SHARE = 50
"""A free op may cost, with all it needs, at most 1/50 of the graph's time, or less than CHEAP_NS."""
CHEAP_NS = 100_000
"""Time of both ways that is never worth a message: about what handling one costs, whatever its size."""
MOST_CLONES = 256
"""A free op may need at most so many others: bounds this pass, and what a stage repeats."""
SMALL_FROZEN_BYTES = 1 << 20
"""A frozen parameter (not a buffer, not a constant) of a free op is at most this big: it will stand in many stages."""


def atoms(graph: Graph) -> Graph:
    """The ops that are not free, each standing for the free ops that it needs and itself.

    Before: a checked graph of captured ops.  After: `Op.parts` of an atom is the free ops it needs, transitively and
    in captured order, then its own name; its reads are graph inputs and values of other atoms; its cost is its own
    and that of the clones no earlier atom was charged for.  Every captured op stands in at least one atom.

    Constant ops cloned into their readers is RaNNC (IPDPS 2021), atomic-level partitioning; cloning what depends on
    inputs is ours.  O(reads + ops * clones of an op).
    """
    free = free_ops(graph)
    place = {op.name: i for i, op in enumerate(graph.ops)}
    maker = {w: place[name] for w, name in graph.writer().items()}
    needs: list[int] = []  # bit j of needs[i]: op i needs free op j
    charged = 0
    kept: list[Op] = []
    for op in graph.ops:
        mask = 0
        for read in op.reads:
            j = maker.get(read)
            if j is not None and graph.ops[j].name in free:
                mask |= needs[j] | 1 << j
        needs.append(mask)
        if op.name not in free:
            cost = sum((graph.ops[j].cost for j in _bits(mask & ~charged)), Cost()) + op.cost
            kept.append(_atom(op, [graph.ops[j] for j in _bits(mask)], free, graph, maker, cost))
            charged |= mask
    alive = {*graph.inputs, *(w for op in kept for w in op.writes)}
    return replace(graph, ops=tuple(kept), values=tuple(v for v in graph.values if v.name in alive))


def _atom(op: Op, clones: list[Op], free: frozenset[str], graph: Graph, maker: dict[str, int], cost: Cost) -> Op:
    """`op` and its clones as one op: their reads from outside, and their parameters, each once and in order."""
    run = [*clones, op]
    reads = dict.fromkeys(r for o in run for r in o.reads if r not in maker or graph.ops[maker[r]].name not in free)
    params = dict.fromkeys(p for o in run for p in o.params)
    return replace(op, reads=tuple(reads), params=tuple(params), parts=tuple(o.name for o in run), cost=cost)


def free_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that may run in several stages instead of sending what they write.

    An op is a candidate when running it twice changes nothing (`_repeatable`), it reads only graph inputs and values
    of candidates, and it is cheap together with all it needs.  A candidate is free when it depends on no input at
    all, or its values are no smaller than the inputs it depends on, or a free op reads it (a small link in the chain
    to a large mask).  O(reads + candidates * clones of an op).
    """
    index = {name: k for k, name in enumerate(graph.inputs)}
    size = {v.name: v.size_bytes for v in graph.values}
    input_bytes = [size[name] for name in graph.inputs]
    maker = {w: i for i, op in enumerate(graph.ops) for w in op.writes}
    repeatable = _repeatable(graph)
    most_ns = max(CHEAP_NS, sum(op.cost.total_ns for op in graph.ops) // HEAVY_SHARE)
    reach: dict[int, tuple[int, int]] = {}  # candidate: bits of the ops it needs and itself, bits of inputs it needs
    for i, op in enumerate(graph.ops):
        if op.name not in repeatable or any(r in maker and maker[r] not in reach for r in op.reads):
            continue
        ops, leaves = 1 << i, 0
        for read in op.reads:
            if read in maker:
                ops |= reach[maker[read]][0]
                leaves |= reach[maker[read]][1]
            else:
                leaves |= 1 << index[read]
        if ops.bit_count() > MOST_CLONES:
            continue
        if sum(graph.ops[j].cost.total_ns for j in _bits(ops)) <= most_ns:
            reach[i] = ops, leaves
    free: set[str] = set()
    wanted: set[str] = set()  # values that a free op reads
    for i in sorted(reach, reverse=True):
        op, leaves = graph.ops[i], reach[i][1]
        sent_bytes = sum(size[w] for w in op.writes)
        worth = sent_bytes >= sum(input_bytes[k] for k in _bits(leaves))
        if not leaves or worth or not wanted.isdisjoint(op.writes):
            free.add(op.name)
            wanted.update(op.reads)
    return frozenset(free)


def _repeatable(graph: Graph) -> set[str]:
    """Ops that may run more than once: nothing random, learned, mutated or differentiated.

    An op that writes an output or an update stays single, so that it is clear which stage holds the result; so does
    one that nobody reads, which would otherwise stand in no stage.
    """
    grad = {v.name for v in graph.values if v.grad}
    params = graph.param_map()
    mutated = {name for name, _ in graph.updates}
    held = {p.name for p in graph.params if p.trainable or p.name in mutated or p.same_as in mutated}
    held |= {p.name for p in params.values() if p.kind == "param" and p.size_bytes > SMALL_FROZEN_BYTES}
    results = {*graph.outputs, *(value for _, value in graph.updates)}
    read = {r for op in graph.ops for r in op.reads}
    return {
        op.name
        for op in graph.ops
        if not op.random
        and held.isdisjoint(op.params)
        and grad.isdisjoint(op.writes)
        and results.isdisjoint(op.writes)
        and not read.isdisjoint(op.writes)
    }


def _bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
