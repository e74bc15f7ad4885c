"""Equal blocks in a row: the rule of tensor parallelism looks at a few of them, and what it finds holds for the others.

A block is a range of ops that is repeated.  Ops at one place of two blocks in a row have one class (`op_classes`) and
are held alike, and read either the same value, or what lies one block further for the later one.  The longest row is
shortened to `KEPT` blocks and a part of one, then the next one, until there is none.
What holds for an op depends on the op alone, so what is copied is exact.  It is also what the rule would
find if the two blocks before those that were left out, and the one behind them, run alike (`LeftOut.again`): else, as
where layers are cut along outputs and inputs by turns, all ops have to be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopart.ir.graph import Graph, Literal, Op
from autopart.passes.ops.analytic_costs import op_classes
from autopart.passes.shards.states import State

KEPT = 4
"""Blocks that are looked at: one behind what comes before, two behind another, and one before what comes after."""
_TRIED = 4
"""Lengths of blocks that are tried, those that most ops repeat at first."""
_SLOTS = 1 << 12
"""More than an op has results or parameters."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was left out.  ops, tensors: of each op, and of each value and parameter, the kept one that is like it.
    again: ops of a block, and the same ops of one behind it."""

    ops: Mapping[str, str]
    tensors: Mapping[str, str]
    again: tuple[tuple[str, str], ...]


def shortened(graph: Graph, held: Mapping[str, State] | None = None) -> tuple[Graph, list[LeftOut]]:
    """Return a graph with few equal blocks, and what was left out, in this order.  held: states of parameters that
    count as part of their ops.  O(reads)."""
    found: list[LeftOut] = []
    while True:
        shorter = _shorter(graph, held or {})
        if shorter is None:
            return graph, found
        graph, left_out = shorter
        found.append(left_out)


def counted(graph: Graph, left_out: Sequence[LeftOut]) -> Counter[str]:
    """Return how many ops each op of a shortened graph stands for.  graph: the whole one."""
    times = Counter(op.name for op in graph.ops)
    for each in left_out:
        for name, kept in each.ops.items():
            times[kept] += times.pop(name)
    return times


def _shorter(graph: Graph, held: Mapping[str, State]) -> tuple[Graph, LeftOut] | None:
    """Return the graph with its longest row shortened; None without one, or where anything else reads of it before
    its last block."""
    references = _References(graph)
    amounts = [tuple([held.get(name) for name in op.params]) for op in graph.ops] if held else [None] * len(graph.ops)
    classes = op_classes(graph, graph, [()] * len(graph.ops), amounts)
    start, end, block = references.longest_row(np.array(classes, dtype=np.int64))
    blocks = (end - start) // block - KEPT if block else 0
    if blocks < 1:
        return None
    first = start + (KEPT - 1) * block
    behind = first + blocks * block
    out, ops = graph.ops[first:behind], graph.ops
    like = {op.name: ops[first - block + n % block] for n, op in enumerate(out)}
    gone = {name for n, op in enumerate(out, first) for name in references.begins(n, op)}
    closer = {
        name: other
        for n in range(max(first, behind - (KEPT - 1) * block), behind)
        for name, other in zip(
            references.begins(n, ops[n]), references.begins(n, ops[n - behind + first]), strict=False
        )
    }
    inner = {name for n in range(start, behind) for name in references.begins(n, ops[n])}
    if (
        any(references.reads_before(n, block, start) for n in range(first - block, first))
        or not inner.isdisjoint(graph.outputs)
        or any(not inner.isdisjoint((*op.reads, *op.params)) for op in ops[end:])
        or any(name in gone and name not in closer for op in ops[behind:end] for name in (*op.reads, *op.params))
    ):
        return None
    shorter = replace(
        graph,
        values=tuple([value for value in graph.values if value.name not in gone]),
        params=tuple([p for p in graph.params if p.name not in gone and p.same_as not in gone]),
        ops=(*ops[:first], *[_renamed(op, closer) for op in ops[behind:]]),
        updates=tuple([(buffer, value) for buffer, value in graph.updates if value not in gone]),
    )
    tensors = {
        name: other
        for n, op in enumerate(out, first)
        for name, other in zip(_named(op), _named(like[op.name]), strict=True)
        if name in gone
    }
    before = [(ops[n - block].name, ops[n].name) for n in range(first - block, first)]
    again = (*before, *[(ops[first - block + n].name, ops[behind + n].name) for n in range(block)])
    return shorter, LeftOut({op.name: like[op.name].name for op in out}, tensors, again)


class _References:
    """Numbers of what ops read: the place of the op that makes a value, or that uses a parameter first."""

    def __init__(self, graph: Graph) -> None:
        """O(reads)."""
        self._begin = {name: -1 - n for n, name in enumerate(graph.inputs)}
        behind = len(graph.ops) * _SLOTS
        self._read: list[tuple[int, ...]] = []
        for n, op in enumerate(graph.ops):
            for slot, name in enumerate(op.params):
                self._begin.setdefault(name, behind + n * _SLOTS + slot)
            self._read.append(tuple([self._begin[name] for name in (*op.reads, *op.params)]))
            self._begin.update(zip(op.writes, range(n * _SLOTS, n * _SLOTS + len(op.writes)), strict=True))
        self._params = behind

    def begins(self, place: int, op: Op) -> list[str]:
        """Return what an op writes, and the parameters that it uses first."""
        return [*op.writes, *[name for name in op.params if (self._begin[name] - self._params) // _SLOTS == place]]

    def reads_before(self, place: int, block: int, start: int) -> bool:
        """Return whether an op reads what lies before this place, and the same op of the next block something else."""
        behind = self._params
        pairs = zip(self._read[place + block], self._read[place], strict=True)
        return any(
            one != other and (other - behind if other >= behind else other) < start * _SLOTS for one, other in pairs
        )

    def longest_row(self, classes: np.ndarray) -> tuple[int, int, int]:
        """Return the place of the first op of a row of equal blocks, the place behind it, and the ops of a block.
        Of the row that may lose most.  classes: of ops.  O(reads)."""
        last: dict[int, int] = {}
        gaps: Counter[int] = Counter()
        for n, number in enumerate(classes.tolist()):
            gaps[n - last.get(number, n)] += 1
            last[number] = n
        del gaps[0]
        best, most = (0, 0, 0), 0
        for block, _ in gaps.most_common(_TRIED):
            run = 0
            for n, alike in enumerate((classes[block:] == classes[:-block]).tolist(), block):
                run = run + 1 if alike and self._alike(n, block) else 0
                blocks = run // block + 1 - KEPT
                if blocks * block > most:
                    best, most = (n - run + 1 - block, n + 1, block), blocks * block
        return best

    def _alike(self, place: int, block: int) -> bool:
        pairs = zip(self._read[place], self._read[place - block], strict=True)
        return all(one == other or one - other == block * _SLOTS for one, other in pairs)


def _named(op: Op) -> tuple[str, ...]:
    return *op.writes, *op.params


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    if names.keys().isdisjoint((*op.reads, *op.params)):
        return op

    def of(literal: Literal) -> Literal:
        if isinstance(literal, tuple):
            return tuple([of(each) for each in literal])
        if isinstance(literal, str) and literal[:1] == "%":
            return f"%{names.get(literal[1:], literal[1:])}"
        return literal

    return replace(
        op,
        reads=tuple([names.get(name, name) for name in op.reads]),
        params=tuple([names.get(name, name) for name in op.params]),
        attrs=tuple([(name, of(given)) for name, given in op.attrs]),
    )
