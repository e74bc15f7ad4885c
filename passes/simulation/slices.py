"""What each slice of a micro-batch's sequences takes of what the whole micro-batch takes.

Of a slice of l tokens behind c others, out of L:

    op that looks back (attention: scores, softmax, their product with V)    l (c + l) / L^2 of its time
    op that depends on inputs alone                                          all of it, with the first slice
    any other op                                                             l / L of its time
    and, however short the slice is, every op of every slice                 its launch
                                                                             reading its weights, and writing their
                                                                             gradients, which are added to those of
                                                                             the slices before

so slices of attention take less in sum than the whole, which computes what its mask hides too, and everything else
takes more.  Shares are those of the costs at the captured size; a stage's own total comes from its estimate.

Assumed, and wrong where: bytes kept are l / L of the whole (what is joined for a slice counts as its own, and what a
recomputed group keeps for later slices is not counted); a window is charged as attention to all tokens before;
attention that skips what is masked (flash kernels) gains less from slices than is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import Device
from autopart.ir.cost import Cost
from autopart.ir.graph import Graph
from autopart.passes.tokens.lengths import Ints

Floats = npt.NDArray[np.float64]
LAUNCH_NS = {"cpu": 15_000, "cuda": 10_000}
"""Nanoseconds that an op takes however short the slice is, with its part in autograd: an order of magnitude."""
_FIXED, _EACH, _BEHIND, _ONCE, _ADDED = range(5)
READ, WRITTEN, ADDED = 1, 1, 3
"""Times that bytes of weights pass the memory for each slice: read by its forward and by its backward, which writes
their gradients; to add these to what is there, both are read, and the sum is written."""


@dataclass(frozen=True)
class SliceShares:
    """tokens: of a sequence.  costs: of the captured ops.  behind, once: those that look back, and those that depend on
    inputs alone.  launch_ns: of one op.  weight_ns, trained_ns: of passing once over the weights that an op reads, and
    over those of them that are trained."""

    tokens: int
    costs: Mapping[str, Cost]
    behind: Collection[str]
    once: Collection[str]
    launch_ns: int
    weight_ns: Mapping[str, float] = field(default_factory=dict)
    trained_ns: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, tokens: int, behind: Iterable[str], once: Iterable[str], device: Device) -> SliceShares:
        """Of a captured graph with costs; device: the first of the cluster.  O(ops)."""
        costs = {op.name: op.cost for op in graph.ops}
        params, ns_per_byte = graph.param_map(), 1e9 / device.reached_bytes_per_s

        def passing_ns(trained: bool) -> dict[str, float]:
            return {
                op.name: ns_per_byte
                * sum(params[p].size_bytes for p in op.params if params[p].trainable or not trained)
                for op in graph.ops
                if op.params
            }

        return SliceShares(
            tokens,
            costs,
            frozenset(behind),
            frozenset(once),
            LAUNCH_NS[device.kind],
            passing_ns(False),
            passing_ns(True),
        )

    def stage_ns(
        self, ops: Collection[str], total_ns: int, lengths: npt.ArrayLike, contexts: npt.ArrayLike, *, backward: bool
    ) -> Floats:
        """Nanoseconds of these slices of a stage of these captured ops, which takes total_ns for whole sequences.

        O(ops + slices).
        """
        sums = self._sums(ops, backward=backward)
        fixed = min(sums[_FIXED], float(total_ns))
        rest = sum(sums[_EACH:_ADDED])
        scale = (total_ns - fixed) / rest if rest else 0.0
        length, context = np.asarray(lengths, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
        whole = float(self.tokens)
        share = sums[_EACH] * length / whole + sums[_BEHIND] * length * (context + length) / whole**2
        return np.asarray(fixed + sums[_ADDED] + scale * (share + sums[_ONCE] * (context == 0)))

    def least_ns(
        self, blocks: Sequence[Collection[str]], totals: npt.ArrayLike, lengths: Sequence[int], *, backward: bool
    ) -> Floats:
        """What stages take in all at least of a micro-batch in slices, however these blocks of captured ops are grouped
        into stages.

        totals: nanoseconds of each block for whole sequences.  Of slices of these lengths one number; without lengths
        one for each count of slices from 2 on, whatever their lengths.

        A stage takes its time for whole sequences, less k (1 - q) of what looks back, and what is fixed s - 1 times
        more, with k = (time - fixed) / (the rest) and q = sum of l (c + l) / L^2, at least (1 + 1 / s) / 2.  A ratio of
        sums is at most the largest of the ratios: so no k is above that of some block.  O(ops + tokens).
        """
        taken, seen, own = np.asarray(totals, dtype=np.float64), set[str](), []
        for ops in blocks:  # what several blocks run counts once, where that makes the bound lower
            own.append(self._sums([name for name in dict.fromkeys(ops) if name not in seen], backward=backward))
            seen.update(ops)
        sums = np.array(own)
        behind = sum(self._sums(ops, backward=backward)[_BEHIND] for ops in blocks)
        rest, beyond = sums[:, _EACH:_ADDED].sum(axis=1), taken - sums[:, _FIXED]
        ratios = np.divide(beyond, rest, out=np.where(beyond > 0, np.inf, 0.0), where=rest > 0)
        most = min(float(taken.sum()), float(max(0.0, ratios.max())) * behind if behind else 0.0)
        counts = np.array([len(lengths)]) if lengths else np.arange(2, max(3, self.tokens + 1))
        looked = (1 + 1 / counts) / 2
        if lengths:
            looked = np.array([float(np.dot(lengths, contexts_of(lengths) + lengths)) / self.tokens**2])
        each_time = np.minimum(sums[:, _FIXED], taken).sum() + sums[:, _ADDED].sum()
        least = taken.sum() - most * (1 - looked) + each_time * (counts - 1) + sums[:, _ADDED].sum()
        # What a stage of nothing but launches takes beyond them is in no slice; and slices take whole nanoseconds.
        return np.asarray(least - beyond[(rest <= 0) & (beyond > 0)].sum() - len(blocks) * counts)

    def _sums(self, ops: Collection[str], *, backward: bool) -> list[float]:
        """What every slice takes, by kind of op what is beyond that, and what adding gradients takes."""
        sums = [0.0] * 5
        for name in ops:
            cost = self.costs.get(name)
            taken = 0 if cost is None else cost.bwd_ns if backward else cost.fwd_ns
            if not taken:
                continue
            if name in self.once:
                sums[_ONCE] += taken
                continue
            fixed = self.launch_ns + READ * self.weight_ns.get(name, 0.0)
            if backward:
                fixed += WRITTEN * self.trained_ns.get(name, 0.0)
                sums[_ADDED] += ADDED * self.trained_ns.get(name, 0.0)
            fixed = min(float(taken), fixed)
            sums[_FIXED] += fixed
            sums[_BEHIND if name in self.behind else _EACH] += taken - fixed
        return sums


def contexts_of(lengths: Sequence[int]) -> Ints:
    """How many tokens stand before each slice."""
    return np.cumsum([0, *lengths[:-1]])


def share_of(size: int, length: int, tokens: int) -> int:
    """Of a size that grows with the tokens, rounded up."""
    return -(-size * length // tokens)
