"""A graph by the names of its ops and values, and what groups of its ops need together, worked out once for each.

A search estimates many stages that differ in what they recompute alone, and many groups again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.ir.shares import largest_share
from autopart.passes.ops.table import keeps
from autopart.passes.ops.weight_parts import summed_bytes

Names = tuple[str, ...]


class Sums(NamedTuple):
    """The fields of `Cost`, summed over some ops; but scratch_bytes is the most of one of them."""

    fwd_ns: int
    bwd_ns: int
    weight_ns: int
    hidden_ns: int
    flops: int
    saved_bytes: int
    weight_bytes: int
    scratch_bytes: int


class Parameters(NamedTuple):
    """The parameters of a stage: names, and bytes of all, of their copies in another precision, of the trainable ones,
    and of gradients as replicas sum them.  once_ns: `Param.once_ns` of all."""

    names: frozenset[str]
    size_bytes: int
    copy_bytes: int
    trained_bytes: int
    summed_bytes: int
    once_ns: int


class Redone(NamedTuple):
    """A recomputed group: what running it again takes, what it saves in its own backward, and values that enter it."""

    again_ns: int
    saved_bytes: int
    inputs: frozenset[str]


class GraphIndex:
    """A graph with its ops and its sizes in bytes by name.

    params: all parameters.  trained: trainable ones.  summed: their gradients as replicas sum them.  copies: copies of
    parameters in another precision.  values: values.
    """

    def __init__(self, graph: Graph) -> None:
        """O(ops + values + parameters)."""
        self.graph = graph
        self.ops = graph.op_map()
        self.params = {p.name: p.size_bytes for p in graph.params}
        self.trained = {p.name: p.size_bytes for p in graph.params if p.trainable}
        self.summed = {p.name: summed_bytes(p) for p in graph.params if p.trainable}
        self.copies = {p.name: p.copy_bytes for p in graph.params if p.copy_bytes}
        self.values = {v.name: v.size_bytes for v in graph.values}
        self._once_ns = {p.name: p.once_ns for p in graph.params if p.once_ns}
        self._sums: dict[Names, Sums] = {}
        self._params: dict[Names, Parameters] = {}
        self._redone: dict[Names, Redone] = {}
        self._largest: dict[tuple[Names, int], int] = {}

    def sums(self, ops: Names) -> Sums:
        """Return what ops cost together.  O(ops), once."""
        if ops not in self._sums:
            costs = [self.ops[name].cost for name in ops]
            sums = [sum([getattr(cost, name) for cost in costs]) for name in Sums._fields[:-1]]
            self._sums[ops] = Sums(*[*sums, max([cost.scratch_bytes for cost in costs], default=0)])
        return self._sums[ops]

    def params_of(self, stage: Stage) -> Parameters:
        """Return the parameters that a stage uses.  O(uses), once."""
        if stage.ops not in self._params:
            names = frozenset(chain.from_iterable([self.ops[op].params for op in stage.ops]))
            tables = (self.params, self.copies, self.trained, self.summed, self._once_ns)
            sizes = [sum([table.get(name, 0) for name in names]) for table in tables]
            self._params[stage.ops] = Parameters(names, *sizes)
        return self._params[stage.ops]

    def largest_share(self, stage: Stage) -> int:
        """Return the bytes of trainable parameters of the replica that owns most of them."""
        key = stage.ops, len(stage.ranks)
        if key not in self._largest:
            trained = self.params_of(stage).names & self.trained.keys()
            self._largest[key] = largest_share([self.trained[name] for name in trained], len(stage.ranks))
        return self._largest[key]

    def redone(self, group: Names) -> Redone:
        """Return what a group takes that is recomputed.  O(reads), once."""
        if group not in self._redone:
            own = [self.ops[name] for name in group]
            inputs = frozenset(chain.from_iterable([op.reads for op in own])).difference(*[op.writes for op in own])
            saved = sum([op.cost.saved_bytes for op in own])
            self._redone[group] = Redone(redone_ns(group, self), saved, inputs)
        return self._redone[group]

    def written(self, stage: Stage) -> set[str]:
        """Return the values that a stage writes.  O(ops)."""
        return set(chain.from_iterable([self.ops[op].writes for op in stage.ops]))


def redone_ns(group: Sequence[str], index: GraphIndex) -> int:
    """Return the nanoseconds of running a recomputed group again, up to the last op whose result autograd needs.

    An op of which only the operands are kept need not run for that.  O(group).
    """
    total = sum([index.ops[name].cost.fwd_ns for name in group])
    for name in reversed(group):
        op = index.ops[name]
        if op.parts not in ((), (name,)):  # a block
            return total - op.cost.tail_ns
        kept = keeps(op.target)
        total -= op.cost.fwd_ns if kept != "after" else 0
        if kept:
            break
    return total
