"""Atoms: the ops between which a stage may begin, each with the free ops that it needs.

A free op is cloned into every stage that needs it, because computing its values there is cheaper than sending them:
attention masks, position ids, RoPE tables, views of buffers.  Assumed: bytes alone decide between sending and
computing, and each message crosses one link.  The time of a clone is charged to the first atom that needs it, so that
the times of atoms add up to that of the graph (`estimate` counts the other clones, which are cheap).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopart.ir.graph import Cost, Graph, Op

HEAVY_SHARE = 50
"""A free op may take, with all it needs, at most 1/50 of the time of the graph, or CHEAP_NS."""
CHEAP_NS = 100_000
"""Time of forward and backward that is never worth a message: about the cost of handling one of any size."""
MOST_CLONES = 256
"""The largest number of ops that a free op may need, itself included: bounds this pass and what a stage repeats."""
SMALL_FROZEN_BYTES = 1 << 20
"""The largest frozen parameter (not a buffer or constant) of a free op, since many stages will hold it."""


def atoms(graph: Graph) -> Graph:
    """Merge every op that is not free with the free ops that it needs.

    Before: a checked graph of captured ops.  After: `Op.parts` of an atom are the free ops it needs, transitively and
    in captured order, then its own name; its reads are graph inputs and values of other atoms; its cost is its own
    with the clones that no earlier atom was charged for.  Every captured op is part of at least one atom.

    RaNNC (IPDPS 2021, atomic-level partitioning) clones constant ops; here ops that depend on inputs are cloned too.
    O(reads + ops * clones of an op).
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
            run = [*(graph.ops[j] for j in _bits(mask)), op]
            reads = [r for o in run for r in o.reads if r not in maker or graph.ops[maker[r]].name not in free]
            params = tuple(dict.fromkeys(p for o in run for p in o.params))
            parts = tuple(o.name for o in run)
            kept.append(replace(op, reads=tuple(dict.fromkeys(reads)), params=params, parts=parts, cost=cost))
            charged |= mask
    alive = {*graph.inputs, *(w for op in kept for w in op.writes)}
    return replace(graph, ops=tuple(kept), values=tuple(v for v in graph.values if v.name in alive))


def free_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that may run in several stages instead of sending what they write.

    A candidate changes nothing when it runs twice (`_repeatable`), reads only graph inputs and values of candidates,
    is cheap together with all it needs, and does not depend on inputs by way of a parameter: layers that are frozen
    for a while are no constants, and stay in one stage.  It is free if it depends on no input, or its values are not
    smaller than the inputs it depends on, or a free op reads it (a small link in the chain to a large mask).
    O(reads + candidates * clones of an op).
    """
    index = {name: k for k, name in enumerate(graph.inputs)}
    size = {v.name: v.size_bytes for v in graph.values}
    input_bytes = [size[name] for name in graph.inputs]
    maker = {w: i for i, op in enumerate(graph.ops) for w in op.writes}
    repeatable = _repeatable(graph)
    most_ns = max(CHEAP_NS, sum(op.cost.total_ns for op in graph.ops) // HEAVY_SHARE)
    layers = {p.name for p in graph.params if p.kind == "param"}
    weighted = 0  # bit i: op i uses a parameter
    reach: dict[int, tuple[int, int]] = {}  # candidate: bits of the ops it needs and itself, bits of inputs it needs
    for i, op in enumerate(graph.ops):
        if op.name not in repeatable or any(r in maker and maker[r] not in reach for r in op.reads):
            continue
        ops, leaves = 1 << i, 0
        weighted |= 0 if layers.isdisjoint(op.params) else 1 << i
        for read in op.reads:
            if read in maker:
                ops |= reach[maker[read]][0]
                leaves |= reach[maker[read]][1]
            else:
                leaves |= 1 << index[read]
        if ops.bit_count() > MOST_CLONES or (leaves and ops & weighted):
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
    """Names of ops that may run in several stages: not random, and with no trained, updated or differentiated tensor.

    An op that writes an output or an update runs in one stage alone; so does one whose results are not read.
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
