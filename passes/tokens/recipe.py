"""How a model runs slice by slice of its tokens: the result of the analysis, from which the code of slices is made.

A slice is tokens [start, end) of a sequence of `tokens`; slices are consecutive.  A value holds tokens along an axis of
size stride * (tokens - short) * block, the token being the middle index: flattening (batch, sequence) gives stride
batch.  short: number of tokens missing at the end, as in logits without the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, end) of `tokens`."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where a value holds tokens, see the module docstring.  reach: number of tokens before the slice that are held
    along an axis of keys; None for all."""

    axis: int
    stride: int = 1
    block: int = 1
    short: int = 0
    reach: int | None = None

    def bounds(self, part: Slice, *, prefix: bool) -> tuple[int, int]:
        """The range of tokens that a slice holds; prefix: with the tokens before the slice."""
        most = part.tokens - self.short
        first = 0 if prefix and self.reach is None else part.start - (self.reach or 0) * prefix
        return min(max(0, first), most), min(part.end, most)

    def size(self, part: Slice, *, prefix: bool) -> int:
        """The size of the axis in a slice."""
        low, high = self.bounds(part, prefix=prefix)
        return self.stride * (high - low) * self.block


@dataclass(frozen=True, slots=True)
class Form:
    """The part of a value that a slice holds.

    queries: the axis of the slice's own tokens.  keys: the axis of these and all earlier tokens.  A value with neither
    is whole.  partial: for a value that is a sum over the tokens, to which each slice adds its own part, the op that
    began to sum; else "".  halo: number of earlier tokens that are held too along `queries`; negative: number of
    entries behind the last token that no slice holds.  order: for a value that is sorted by token, or describes how
    others are: (the sort, what the value holds, number of parts).
    """

    queries: TokenLayout | None = None
    keys: TokenLayout | None = None
    partial: str = ""
    halo: int = 0
    order: tuple[str, str, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether every slice holds the whole value."""
        return self.queries is None and self.keys is None and not self.partial and self.order is None

    def as_prefix(self, reach: int | None = None) -> Form:
        """The form of a value of own tokens after it was joined with the earlier ones.  reach: number of these."""
        return Form(keys=self.queries and replace(self.queries, reach=reach))

    def reaching(self, reach: int) -> Form:
        """This form with `reach` earlier tokens along the axis of keys."""
        return replace(self, keys=self.keys and replace(self.keys, reach=reach))

    def roles(self) -> Iterator[tuple[bool, TokenLayout]]:
        """(whether earlier tokens are held too, layout) of each axis that holds tokens."""
        if self.queries is not None:
            yield False, self.queries
        if self.keys is not None:
            yield True, self.keys

    def shape(self, shape: Shape, part: Slice) -> Shape:
        """The shape in a slice of a value that is of this shape as a whole."""
        sizes = list(shape)
        for prefix, layout in self.roles():
            sizes[layout.axis] = layout.size(part, prefix=prefix)
        if self.halo > 0 and self.queries is not None:
            sizes[self.queries.axis] += self.halo * self.queries.stride * self.queries.block
        return tuple(sizes)

    def moved(self, place: Callable[[int], int]) -> Form:
        """This form with its tokens along other axes.  place: from the old axis to the new one."""
        queries = self.queries and replace(self.queries, axis=place(self.queries.axis))
        return replace(self, queries=queries, keys=self.keys and replace(self.keys, axis=place(self.keys.axis)))


WHOLE = Form()

# What a value holds that is sorted by token, or describes how others are (`Form.order`).
SORTED = "sorted"  # entries of tokens in sorted order
KEYS = "keys"  # what was sorted
PLACES = "places"  # from where each entry came; in parts: indices into a vector with one entry for each `parts`
INVERSE = "inverse"  # to where each entry goes back
COUNTS = "counts"  # number of entries of each key; parts: number of keys
OFFSETS = "offsets"  # where the entries of each key end

# How the code of a slice runs an op, where it differs from the captured program.
PLAIN = ""
SIZES = "sizes"  # with the sizes of the result in the slice
CAUSAL = "causal"  # attention with is_causal=True: with an equivalent mask for the slice
LOSS = "loss"  # the mean of a loss function: the sum over the slice, divided by the count of the whole sequence
MEAN = "mean"  # the sum over the slice, divided by the size of the whole
MADE = "made"  # a constant of the captured shape
CARRY = "carry"  # a sum along the tokens: continued from the end of the slice before
PADDED = "padded"  # a padding in front: the tokens before the slice, and padding before the first token
CONV = "conv"  # a convolution that pads by itself: run on the tokens before the slice, and padding before the first
SHIFT = "shift"  # the tokens of the slice, each `amount` earlier
WINDOW = "window"  # of a value with earlier tokens those of the slice, from index `amount` on
DRAWN = "drawn"  # random: drawn for the whole sequence, of which the slice takes its own tokens
INVERT = "invert"  # the inverse of a permutation
ONCE = "once"  # whole operands count in the first slice alone
DIAGONAL = "diagonal"  # the diagonal moves with the start of the slice

# What a mask or a bias is wherever the key is later than the query.
FALSE, TRUE, ZERO, ONE = "false", "true", "zero", "one"
NEGATIVE = "negative"  # so low that the probability is 0 beside visible keys
MINUS_INF = "-inf"  # minus infinity: the probability is always 0


class QueryKeyAxes(NamedTuple):
    """The axes of a value along which queries and keys lie; None where it is the same for all of them."""

    value: str
    queries: int | None
    keys: int | None


Claim = tuple[QueryKeyAxes, str]
"""A value, and what it is wherever the key is later than the query."""


@dataclass(frozen=True, slots=True)
class OpRecipe:
    """How the code of a slice runs an op.

    reads: what the op needs of each tensor argument, in order; keys of a value that holds its own tokens alone stand
    for these and the earlier ones.  results: the form of each result by name.  how: one of the words above; amount: its
    number of tokens.  relies_on: claims of which one must hold for no later token to be seen.
    """

    reads: tuple[Form, ...]
    results: Mapping[str, Form]
    how: str = PLAIN
    amount: int = 0
    relies_on: tuple[Claim, ...] = ()


class MaskGuard(NamedTuple):
    """The check of each batch for an op whose masks are finite numbers: every query must see a key that is not later,
    else its attention would be spread over all keys; and nothing else that is added to the scores may undo the masks.

    masks: values that hide keys, and how: where they are FALSE, TRUE or NEGATIVE.  lifts: of everything else that is
    added to the scores: (value, factor, largest number allowed, largest number that hides).
    """

    op: str
    masks: tuple[tuple[QueryKeyAxes, str], ...]
    lifts: tuple[tuple[QueryKeyAxes, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class TokenAxis:
    """What the planner knows of a recipe.  tokens: of a sequence.  behind: ops that read earlier tokens too.  once: ops
    of the prologue.  Both sorted."""

    tokens: int
    behind: tuple[str, ...] = ()
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How a model runs slice by slice.

    tokens: of the sequence.  prologue: ops that depend on inputs and constants alone: they run at full length, once a
    micro-batch.  ops: how every other op runs.  chain: for a value that only rearranges or repeats elements of another,
    that one: K and V may be kept as any of them.  guards: checks of each batch.  reach: for values that are read with
    earlier tokens, the number of these; all where it is missing.  constants: buffers whose numbers were used in the
    proof that no token sees a later one.
    """

    tokens: int
    prologue: frozenset[str]
    ops: Mapping[str, OpRecipe]
    chain: Mapping[str, str] = field(default_factory=dict)
    guards: tuple[MaskGuard, ...] = ()
    reach: Mapping[str, int] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The form of every value that is not made by the prologue."""
        return {name: form for recipe in self.ops.values() for name, form in recipe.results.items()}

    def form(self, value: str) -> Form:
        """The form of a value; what the prologue makes, inputs and parameters are whole."""
        return self.forms.get(value, WHOLE)

    def slices(self, lengths: Sequence[int]) -> list[Slice]:
        """Slices of these lengths."""
        return [Slice(start, end, self.tokens) for start, end in pairwise(accumulate(lengths, initial=0))]

    def axis(self) -> TokenAxis:
        """What the planner knows of it."""
        behind = [
            name
            for name, recipe in self.ops.items()
            if any(form.keys is not None for form in (*recipe.reads, *recipe.results.values()))
        ]
        return TokenAxis(self.tokens, tuple(sorted(behind)), tuple(sorted(self.prologue)))
