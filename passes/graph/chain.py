"""A chain of blocks, and the cost of every range [a, b) of it, at any size on any type of device.

Times, saved bytes and operations of a range are differences of prefix sums; the bytes that enter a range and that it
holds are matrices in which each value and each parameter counts once (`cuts`).

Assumed: a clone of a free op is paid by the first block that has it (the chosen plan is costed exactly).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopart.ir.graph import Cost, Graph, Size
from autopart.passes.graph.cuts import Ints, crossing_bytes, entering_bytes, holding_bytes
from autopart.passes.ops.cost_model import FIELDS, OpCosts
from autopart.passes.ops.table import keeps


@dataclass(frozen=True)
class RangeCosts:
    """Costs of the blocks at one size on one type of device.

    blocks: a row for each of `FIELDS`.  sizes: bytes of each value between blocks.  crossing: bytes over each boundary,
    forward.  chain: the blocks, at any size.
    """

    blocks: Ints
    sizes: Ints
    crossing: Ints
    chain: Graph

    @cached_property
    def _entering(self) -> tuple[Ints, Ints]:
        return entering_bytes(_resized(self.chain, self.sizes))

    @property
    def enters(self) -> Ints:
        """[a, b]: bytes into the range."""
        return self._entering[0]

    @property
    def returns(self) -> Ints:
        """[a, b]: bytes of the gradients of what enters the range."""
        return self._entering[1]

    def forget(self) -> None:
        """Drop all matrices; they are computed again when they are asked for."""
        for name in _MATRICES:
            vars(self).pop(name, None)

    def ranges(self, field: str) -> Ints:
        """[a, b]: the sum over the range of a cost, in its unit (`ir.graph.Cost`)."""
        sums = np.concatenate([[0], np.cumsum(self.blocks[FIELDS.index(field)])]).astype(np.int64)
        return np.asarray(sums[None, :] - sums[:, None])

    @cached_property
    def largest(self) -> dict[str, Ints]:
        """By kind of cost, [a, b]: the most of it, in its unit, that one block of the range has."""
        return {
            field: largest(self.blocks[FIELDS.index(field)]) for field in ("saved_bytes", "scratch_bytes", "tail_ns")
        }

    @cached_property
    def kept(self) -> Ints:
        """[a, b]: bytes that cross boundaries inside the range, which stay when each block is recomputed."""
        sums = np.concatenate([[0], np.cumsum(self.crossing[1:])])  # entry i: boundaries 1 .. i
        inner = sums[np.maximum(np.arange(len(sums)) - 1, 0)][None, :] - sums[:, None]
        return np.asarray(np.maximum(inner, 0))

    @cached_property
    def least_crossing(self) -> Ints:
        """[a, b]: the fewest bytes that cross a boundary inside the range, 0 where there is none."""
        n = len(self.crossing) - 1
        result = np.zeros((n + 1, n + 1), dtype=np.int64)
        for a in range(n - 1):
            result[a, a + 2 :] = np.minimum.accumulate(self.crossing[a + 1 : n])
        return result


_MATRICES = "_entering", "largest", "kept", "least_crossing"
_SIZES_KEPT = 8
"""Sizes whose matrices are kept: 60 MB each of the most blocks."""


def _resized(blocks: Graph, sizes: Ints) -> Graph:
    values = tuple(replace(v, size_bytes=size) for v, size in zip(blocks.values, sizes.tolist(), strict=True))
    return replace(blocks, values=values)


def largest(amounts: Ints) -> Ints:
    """[a, b]: the largest of amounts[a:b], 0 where it is empty.  O(n^2)."""
    n = len(amounts)
    result = np.zeros((n + 1, n + 1), dtype=np.int64)
    for a in range(n):
        result[a, a + 1 :] = np.maximum.accumulate(amounts[a:])
    return result


class BlockChain:
    """A chain of blocks and the costs of its ranges, computed once for each size and type of device.

    blocks: from `coarsen`, in order.  n: their number.  weights, trained, largest_trained: [a, b] is the bytes of all
    parameters, of the trainable ones, and of the largest trainable one of the range.
    """

    def __init__(self, blocks: Graph, captured: Graph, cost_model: OpCosts) -> None:
        """cost_model: of `captured`, which the blocks were made of."""
        self.blocks = blocks
        self.n = len(blocks.ops)
        self.weights = holding_bytes(blocks, 1.0)
        self.trained = np.asarray(holding_bytes(blocks, 2.0) - self.weights)
        sizes = {p.name: p.size_bytes for p in blocks.params if p.trainable}
        most = [max((sizes.get(name, 0) for name in op.params), default=0) for op in blocks.ops]
        self.largest_trained = largest(np.array(most, dtype=np.int64))
        self.captured, self.cost_model = captured, cost_model
        owner: dict[str, int] = {}  # the first block that holds each captured op
        for i, block in enumerate(blocks.ops):
            for part in block.parts or (block.name,):
                owner.setdefault(part, i)
        self._block_of_op = np.array([owner[op.name] for op in captured.ops], dtype=np.int64)
        self._in_tail = _in_tail(captured, self._block_of_op.tolist())
        self._range_costs: dict[tuple[Size, int], RangeCosts] = {}

    def range_costs(self, size: Size, device_type: int = 0) -> RangeCosts:
        """Costs (nanoseconds, bytes, FLOPs) at this size on this type of device."""
        key = size, device_type
        found = self._range_costs.pop(key, None) or self._compute(size, device_type)
        self._range_costs[key] = found  # the last one
        if len(self._range_costs) > _SIZES_KEPT:
            list(self._range_costs.values())[-1 - _SIZES_KEPT].forget()
        return found

    def graph(self, size: Size, device_type: int = 0) -> Graph:
        """The blocks as a graph with these costs and sizes; shapes are not changed."""
        costs = self.range_costs(size, device_type)
        columns = costs.blocks.T.tolist()
        ops = tuple(replace(op, cost=Cost(*column)) for op, column in zip(self.blocks.ops, columns, strict=True))
        return replace(_resized(self.blocks, costs.sizes), size=size, ops=ops)

    def _compute(self, size: Size, device_type: int) -> RangeCosts:
        table = self.cost_model.table(size, device_type)
        sums = np.stack([np.bincount(self._block_of_op, weights=row, minlength=self.n) for row in table.columns])
        scratch = FIELDS.index("scratch_bytes")
        sums[scratch] = 0.0
        np.maximum.at(sums[scratch], self._block_of_op, table.columns[scratch])
        tails = table.columns[FIELDS.index("fwd_ns")] * self._in_tail
        sums[FIELDS.index("tail_ns")] = np.bincount(self._block_of_op, weights=tails, minlength=self.n)
        sizes = np.array([table.value_bytes[v.name] for v in self.blocks.values], dtype=np.int64)
        resized = _resized(self.blocks, sizes)
        forward = replace(resized, values=tuple(replace(v, grad=False) for v in resized.values))
        return RangeCosts(sums.astype(np.int64), sizes, crossing_bytes(forward), self.blocks)


def _in_tail(captured: Graph, block_of_op: Sequence[int]) -> Ints:
    """1 for each captured op that is not run again when its block is the last one of a recomputed group
    (`charges`), 0 for the others."""
    found = np.zeros(len(block_of_op), dtype=np.int64)
    over: set[int] = set()
    for place in reversed(range(len(block_of_op))):
        block = block_of_op[place]
        if block in over:
            continue
        kept = keeps(captured.ops[place].target)
        found[place] = kept != "after"
        if kept:
            over.add(block)
    return found
