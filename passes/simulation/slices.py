"""What each slice of a micro-batch's sequences takes of what the whole micro-batch takes.

Of a slice of l tokens behind c others, out of L:

    op that looks back (attention: scores, softmax, their product with V)    l (c + l) / L^2 of its time
    op that depends on inputs alone                                          all of it, with the first slice
    any other op                                                             l / L of its time
    and every op of every slice                                              its launch, once

so slices of attention take less in sum than the whole, which computes what its mask hides too.  Shares are those of the
costs at the captured size; a stage's own total comes from its estimate.

Assumed, and wrong where: bytes kept are l / L of the whole (states that later slices read again are not counted twice);
attention that skips what is masked (flash kernels) gains less from slices than is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopart.ir.cost import Cost
from autopart.ir.graph import Graph
from autopart.passes.tokens.lengths import Ints

Floats = npt.NDArray[np.float64]
LAUNCH_NS = {"cpu": 15_000, "cuda": 10_000}
"""Nanoseconds that an op takes however short the slice is, with its part in autograd: an order of magnitude."""
_LAUNCH, _EACH, _BEHIND, _ONCE = range(4)


@dataclass(frozen=True)
class SliceShares:
    """tokens: of a sequence.  costs: of the captured ops.  behind, once: those that look back, and those that depend on
    inputs alone.  launch_ns: of one op."""

    tokens: int
    costs: Mapping[str, Cost]
    behind: Collection[str]
    once: Collection[str]
    launch_ns: int

    @staticmethod
    def of(graph: Graph, tokens: int, behind: Iterable[str], once: Iterable[str], device_kind: str) -> SliceShares:
        """Of a captured graph with costs.  O(ops)."""
        costs = {op.name: op.cost for op in graph.ops}
        return SliceShares(tokens, costs, frozenset(behind), frozenset(once), LAUNCH_NS[device_kind])

    def stage_ns(
        self, ops: Collection[str], total_ns: int, lengths: npt.ArrayLike, contexts: npt.ArrayLike, *, backward: bool
    ) -> Floats:
        """Nanoseconds of these slices of a stage of these captured ops, which takes total_ns for whole sequences.

        O(ops + slices).
        """
        sums = self._sums(ops, backward=backward)
        launch = min(sums[_LAUNCH], float(total_ns))
        rest = sum(sums[_EACH:])
        scale = (total_ns - launch) / rest if rest else 0.0
        length, context = np.asarray(lengths, dtype=np.float64), np.asarray(contexts, dtype=np.float64)
        whole = float(self.tokens)
        share = sums[_EACH] * length / whole + sums[_BEHIND] * length * (context + length) / whole**2
        return np.asarray(launch + scale * (share + sums[_ONCE] * (context == 0)))

    def _sums(self, ops: Collection[str], *, backward: bool) -> list[float]:
        """Launches, and by kind of op what is beyond them."""
        sums = [0.0] * 4
        for name in ops:
            cost = self.costs.get(name)
            taken = 0 if cost is None else cost.bwd_ns if backward else cost.fwd_ns
            if not taken:
                continue
            if name in self.once:
                sums[_ONCE] += taken
                continue
            launch = min(taken, self.launch_ns)
            sums[_LAUNCH] += launch
            sums[_BEHIND if name in self.behind else _EACH] += taken - launch
        return sums


def contexts_of(lengths: Sequence[int]) -> Ints:
    """How many tokens stand before each slice."""
    return np.cumsum([0, *lengths[:-1]])


def share_of(size: int, length: int, tokens: int) -> int:
    """Of a size that grows with the tokens, rounded up."""
    return -(-size * length // tokens)
