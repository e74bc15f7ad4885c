"""What each rank of a shard group holds of a value, and of its gradient; and how one such state becomes another.

    cut       a part along one digit of an axis        its gradient: the same part
    whole     all of it, equal on all ranks            its gradient: all of it, equal on all ranks
    copy      all of it, equal on all ranks            its gradient: an addend; the sum over the ranks counts
    partial   an addend; the sum over the ranks counts its gradient: all of it, equal on all ranks

A value that ops read as they compute with cut operands is read as a copy: each rank has the part of its gradient that
comes from its own part of the work.  A parameter that ranks hold whole is a copy: its gradient is summed once a step.
`TRANSITIONS` is the one table of changes: the choice prices it, the rewrite writes it, the checker looks edges up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CUT_KIND, WHOLE_KIND, COPY_KIND, PARTIAL_KIND = "cut", "whole", "copy", "partial"


@dataclass(frozen=True, slots=True, order=True)
class State:
    """What a rank holds of a value.  Of a cut one: its axis is (before, shards, the rest), and a rank has its entry of
    the middle one."""

    kind: str
    axis: int = 0
    before: int = 1

    def __str__(self) -> str:
        if self.kind != CUT_KIND:
            return self.kind
        return f"cut[{self.axis}]" if self.before == 1 else f"cut[{self.axis}:{self.before}]"

    def fits(self, shape: Sequence[int], shards: int) -> bool:
        """Return whether a tensor of this shape has equal parts like this."""
        if self.kind != CUT_KIND:
            return True
        return self.axis < len(shape) and shape[self.axis] > 0 and shape[self.axis] % (self.before * shards) == 0

    def local(self, shape: Sequence[int], shards: int) -> tuple[int, ...]:
        """Return the shape of what a rank holds of a tensor of this shape."""
        if self.kind != CUT_KIND:
            return tuple(shape)
        return tuple(size // shards if axis == self.axis else size for axis, size in enumerate(shape))


WHOLE, COPY, PARTIAL = State(WHOLE_KIND), State(COPY_KIND), State(PARTIAL_KIND)


def cut(axis: int, before: int = 1) -> State:
    """Return the state of a value that is cut along an axis, behind digits of this product."""
    return State(CUT_KIND, axis, before)


@dataclass(frozen=True, slots=True)
class Transition:
    """What the forward does with a value, and the backward with its gradient, each a word of `MOVES`.

    Words about a cut act along that of the state that is cut: the old one if only it is, else the new one; "other" says
    the same of two different cuts."""

    forward: str
    backward: str


KEEP, SUM, GATHER, SLICE, SCATTER, FIRST, PAD, RECUT = (
    "keep", "sum", "gather", "slice", "scatter", "first", "pad", "recut"
)  # fmt: skip
MOVES = {KEEP: 0, SLICE: 0, FIRST: 0, PAD: 0, GATHER: 1, SCATTER: 1, SUM: 2, RECUT: 1}
"""What a rank does with a tensor, and how often about all bytes of the whole value pass a link of it.  sum: over the
ranks; gather: join all parts; slice: take the own part; scatter: sum, and take the own part; first: the first rank's,
zeros on others; pad: the own part among zeros; recut: gather along one cut, slice along another."""

TRANSITIONS: dict[tuple[str, str], Transition] = {
    (WHOLE_KIND, WHOLE_KIND): Transition(KEEP, KEEP),
    (WHOLE_KIND, COPY_KIND): Transition(KEEP, SUM),
    (WHOLE_KIND, CUT_KIND): Transition(SLICE, GATHER),
    (WHOLE_KIND, PARTIAL_KIND): Transition(FIRST, KEEP),
    (COPY_KIND, COPY_KIND): Transition(KEEP, KEEP),
    (COPY_KIND, WHOLE_KIND): Transition(KEEP, FIRST),
    (COPY_KIND, CUT_KIND): Transition(SLICE, PAD),
    (COPY_KIND, PARTIAL_KIND): Transition(FIRST, FIRST),
    (CUT_KIND, WHOLE_KIND): Transition(GATHER, SLICE),
    (CUT_KIND, COPY_KIND): Transition(GATHER, SCATTER),
    (CUT_KIND, CUT_KIND): Transition(RECUT, RECUT),
    (CUT_KIND, PARTIAL_KIND): Transition(PAD, SLICE),
    (PARTIAL_KIND, PARTIAL_KIND): Transition(KEEP, KEEP),
    (PARTIAL_KIND, WHOLE_KIND): Transition(SUM, KEEP),
    (PARTIAL_KIND, COPY_KIND): Transition(SUM, SUM),
    (PARTIAL_KIND, CUT_KIND): Transition(SCATTER, GATHER),
}
"""How a value in the first state is read in the second.  Two different cuts are `RECUT`; equal states need nothing."""


def transition(held: State, wanted: State) -> Transition:
    """Return how a value that is held in one state is read in another."""
    return Transition(KEEP, KEEP) if held == wanted else TRANSITIONS[held.kind, wanted.kind]


def passes(held: State, wanted: State) -> tuple[int, int]:
    """Return how often the bytes of a value pass a link of a rank, in the forward and in the backward."""
    change = transition(held, wanted)
    return MOVES[change.forward], MOVES[change.backward]
