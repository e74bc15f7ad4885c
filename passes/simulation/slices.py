"""The share of a stage's time that each slice of a micro-batch's sequences takes.

A slice of l tokens behind c others, out of L, takes:

    op that looks back (attention: scores, softmax, their product with V)    l (c + l) / L^2 of its time; twice that
                                                                             if its kernel skips what causality hides
                                                                             (l^2 / L^2 of the first slice)
    op that depends on inputs alone                                          all of it, with the first slice
    any other op                                                             l / L of its time
    every op of every slice, however short                                   its launch; reading its weights, and
                                                                             adding its gradients to those of earlier
                                                                             slices; the latency of its exchanges with
                                                                             ranks that compute parts of it

A GPU reads weights while it computes: there a slice takes the larger of its share and of the passes over its weights,
as the roofline of whole sequences does.  A CPU takes both, one after the other.

So slices of attention with a mask take less in sum than the whole sequence, which computes what its mask hides too.
Those of a causal kernel, which later slices run with a mask, take more, as everything else does.  Shares are those of
the costs at the captured size; the total of a stage comes from its estimate.

Assumed, and wrong where: kept bytes are l / L of the whole (what is joined for a slice counts as its own, and what a
recomputed group keeps for later slices is not counted); a window is charged as attention to all earlier tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import DEVICE_KINDS, Device
from autopart.ir.graph import Cost, Graph
from autopart.passes.ops.analytic_costs import added_ns
from autopart.passes.ops.flops import operands, seen_share
from autopart.passes.tokens.lengths import Ints
from autopart.passes.tokens.recipe import TokenAxis

Floats = npt.NDArray[np.float64]
_FIXED, _EACH, _BEHIND, _CAUSAL, _ONCE = range(5)
READ, WRITTEN = 1, 1
"""Passes over the bytes of weights for each slice: its forward and its backward read them, its backward writes
gradients; what adds these to the sum so far is counted apart (`ops.weight_parts`)."""
PREFIX = 5
"""Passes over the gradients of the keys and values before a slice: they are cut off those of its own tokens, which is
read and written, and added to the sum that waits for the earlier backwards, which reads both and writes one."""
SUMMED = 2
"""Passes over a gradient that the product itself adds to the sum so far: it reads and writes the sum."""


@dataclass(frozen=True)
class SliceShares:
    """The data from which the times of slices follow.

    tokens: of a sequence.  costs: of the captured ops.  behind: ops that look back.  once: ops that depend on inputs
    alone.  launch_ns: of one op.  weight_ns, trained_ns: one pass over the weights that an op reads, and over those of
    them that are trained.  hides: whether the passes over weights hide behind computing (roofline).  added_ns: of each
    backward, spent on adding gradients to their sums.  causal: of those behind, ops whose kernels skip what is hidden.
    prefix_ns: of ops behind, one pass over the gradients of the keys and values of a whole sequence.  exchange_ns: of
    the forward and of the backward, what exchanges take however few tokens they are about.
    """

    tokens: int
    costs: Mapping[str, Cost]
    behind: Collection[str]
    once: Collection[str]
    launch_ns: int
    weight_ns: Mapping[str, float] = field(default_factory=dict)
    trained_ns: Mapping[str, float] = field(default_factory=dict)
    hides: bool = False
    added_ns: Mapping[str, float] = field(default_factory=dict)
    causal: Collection[str] = ()
    prefix_ns: Mapping[str, float] = field(default_factory=dict)
    exchange_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def stage_ns(
        self, ops: Collection[str], total_ns: int, lengths: npt.ArrayLike, contexts: npt.ArrayLike, *, backward: bool
    ) -> Floats:
        """Return the nanoseconds of slices of a stage of these ops, which takes total_ns for whole sequences.

        contexts: tokens before each slice.  O(ops + slices * kinds of ops).
        """
        hidden: Counter[tuple[float, float]] = Counter()
        sums = self._sums(ops, backward=backward, hidden=hidden)
        fixed = min(sums[_FIXED], float(total_ns))
        rest = sum(sums[_EACH:])
        scale = (total_ns - fixed) / rest if rest else 0.0
        length, context = np.asarray(lengths, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
        whole = float(self.tokens)
        square = length * (context + length) / whole**2
        share = sums[_EACH] * length / whole + sums[_BEHIND] * square
        share = share + sums[_CAUSAL] * square * np.where(context == 0, 1.0, 2.0)
        for (taken, least), count in hidden.items():
            share = share + count * np.maximum(0.0, least - taken * length / whole)
        prefix = PREFIX * sum([self.prefix_ns.get(name, 0.0) for name in ops]) if backward else 0.0
        return np.asarray(fixed + scale * (share + sums[_ONCE] * (context == 0) + prefix * context / whole))

    def least_ns(
        self, blocks: Sequence[Collection[str]], totals: npt.ArrayLike, lengths: Sequence[int], *, backward: bool
    ) -> Floats:
        """Return a lower bound in nanoseconds of all stages together for a micro-batch in slices, however these blocks
        of captured ops are grouped into stages.

        totals: nanoseconds of each block for whole sequences.  With lengths the result is one number; without, there is
        one for each count of slices from 2 on, whatever their lengths.

        A stage takes its time for whole sequences, less k (1 - q) of the ops that look back, plus s - 1 times its fixed
        time, with k = (time - fixed) / (the rest) and q = sum of l (c + l) / L^2, at least (1 + 1 / s) / 2.  A ratio of
        sums is at most the largest of the ratios: so no k is above that of some block.  Ops of causal kernels save
        nothing: their slices take 2 q less that of the first slice, at least 1.  O(ops + tokens).
        """
        taken, seen, own = np.asarray(totals, dtype=np.float64), set[str](), []
        for ops in blocks:  # an op of several blocks counts once, where that makes the bound lower
            own.append(self._sums([name for name in dict.fromkeys(ops) if name not in seen], backward=backward))
            seen.update(ops)
        sums = np.array(own)
        behind = sum(self._sums(ops, backward=backward)[_BEHIND] for ops in blocks)
        rest, beyond = sums[:, _EACH:].sum(axis=1), taken - sums[:, _FIXED]
        ratios = np.divide(beyond, rest, out=np.where(beyond > 0, np.inf, 0.0), where=rest > 0)
        most = min(float(taken.sum()), float(max(0.0, ratios.max())) * behind if behind else 0.0)
        counts = np.array([len(lengths)]) if lengths else np.arange(2, max(3, self.tokens + 1))
        looked = (1 + 1 / counts) / 2
        if lengths:
            looked = np.array([float(np.dot(lengths, contexts_of(lengths) + lengths)) / self.tokens**2])
        each_time = np.minimum(sums[:, _FIXED], taken).sum()
        least = taken.sum() - most * (1 - looked) + each_time * (counts - 1)
        # The time of a stage beyond its launches, if it has nothing else, is in no slice; times are rounded down.
        return np.asarray(least - beyond[(rest <= 0) & (beyond > 0)].sum() - len(blocks) * counts)

    def _sums(
        self, ops: Collection[str], *, backward: bool, hidden: Counter[tuple[float, float]] | None = None
    ) -> list[float]:
        """Return the fixed time of every slice, and the rest by kind of op.

        hidden: gets how many ops there are of each time beyond the launch and of passes over weights that hide in it.
        """
        sums, reads = [0.0] * 5, self.weight_ns if self.hides and hidden is not None else {}
        for name in ops:
            cost = self.costs.get(name)
            taken = 0 if cost is None else cost.bwd_ns if backward else cost.fwd_ns
            if not taken:
                continue
            if name in self.once:
                sums[_ONCE] += taken
                continue
            fixed = self.launch_ns if self.hides else self.launch_ns + READ * self.weight_ns.get(name, 0.0)
            fixed += self.exchange_ns.get(name, (0, 0))[backward]
            if backward:
                fixed += self.added_ns.get(name, 0.0)
                fixed += 0.0 if self.hides else WRITTEN * self.trained_ns.get(name, 0.0)
            fixed = min(float(taken), fixed)
            sums[_FIXED] += fixed
            behind = name in self.behind
            sums[_EACH if not behind else _CAUSAL if name in self.causal else _BEHIND] += taken - fixed
            if hidden is not None and not behind and (weight := reads.get(name)):
                passes = READ * weight + (SUMMED * self.trained_ns.get(name, 0.0) if backward else 0.0)
                hidden[taken - fixed, min(taken - fixed, passes)] += 1
        return sums


def slice_shares(
    graph: Graph, axis: TokenAxis, device: Device, exchange_ns: Mapping[str, tuple[int, int]] = MappingProxyType({})
) -> SliceShares:
    """Return the shares of a captured graph with costs.  device: the first of the cluster.  O(ops)."""
    params, values, ns_per_byte = graph.param_map(), graph.value_map(), 1e9 / device.reached_bytes_per_s

    def passing_ns(trained: bool) -> dict[str, float]:
        sizes = {
            op.name: sum(params[p].size_bytes for p in op.params if params[p].trainable or not trained)
            for op in graph.ops
            if op.params
        }
        return {name: ns_per_byte * size for name, size in sizes.items()}

    costs, kind = {op.name: op.cost for op in graph.ops}, DEVICE_KINDS[device.kind]
    behind = frozenset(axis.behind)
    causal = [op.name for op in graph.ops if op.name in behind and seen_share(op, values, params, device.kind) < 1.0]
    learned = {value.name: value.size_bytes for value in graph.values if value.grad}
    read = {op.name: [ref[1:] for ref in operands(op)[1:3]] for op in graph.ops if op.name in behind}
    return SliceShares(
        *(axis.tokens, costs, behind, frozenset(axis.once), kind.slice_ns, passing_ns(False), passing_ns(True)),
        hides=kind.beside,
        added_ns=added_ns(graph, device),
        causal=frozenset(causal),
        prefix_ns={name: ns_per_byte * sum([learned.get(ref, 0) for ref in refs]) for name, refs in read.items()},
        exchange_ns=exchange_ns,
    )


def contexts_of(lengths: Sequence[int]) -> Ints:
    """Return the number of tokens before each slice."""
    return np.cumsum([0, *lengths[:-1]])


def share_of(size: int, length: int, tokens: int) -> int:
    """Return the share of a slice in a size that grows with the tokens, rounded up."""
    return -(-size * length // tokens)
