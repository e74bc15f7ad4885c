"""How a model is run slice by slice of its tokens: what the analysis finds and the cutting of stage code reads.

A slice is tokens [start, end) of a sequence of `tokens`; slices are consecutive.  A value holds tokens along an axis of
size stride * (tokens - short) * block, the token being the middle index: flattening (batch, sequence) gives stride
batch.  short: how many tokens it lacks at the end, as logits without the last one do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopart.ir.graph import Op

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, end) of `tokens`."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where a value holds tokens; the module docstring says how.  reach: of keys, so many before the slice alone."""

    axis: int
    stride: int = 1
    block: int = 1
    short: int = 0
    reach: int | None = None

    def bounds(self, part: Slice, *, prefix: bool) -> tuple[int, int]:
        """Which of the tokens that this axis has belong to a slice; prefix: and to those before it."""
        most = part.tokens - self.short
        first = 0 if prefix and self.reach is None else part.start - (self.reach or 0) * prefix
        return min(max(0, first), most), min(part.end, most)

    def size(self, part: Slice, *, prefix: bool) -> int:
        """The size of the axis in a slice."""
        low, high = self.bounds(part, prefix=prefix)
        return self.stride * (high - low) * self.block


@dataclass(frozen=True, slots=True)
class Form:
    """What a slice holds of a value.

    queries: an axis that holds the tokens of the slice.  keys: an axis that holds those and all before.  Neither: it is
    whole.  partial: the value is the sum of what the slices have; origin: the op that began to sum.
    halo: along `queries` it holds so many tokens before the slice too; negative: so many entries behind the last token
    are held by no slice.
    order: of what a sort of the tokens made or brought in its order: the sort, what it holds, and in how many parts.
    """

    queries: TokenLayout | None = None
    keys: TokenLayout | None = None
    partial: bool = False
    origin: str = ""
    halo: int = 0
    order: tuple[str, str, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether every slice holds all of it."""
        return self.queries is None and self.keys is None and not self.partial and self.order is None

    def as_prefix(self, reach: int | None = None) -> Form:
        """What holds the tokens of the slices before too, of a value that holds those of one; reach: so many alone."""
        return Form(keys=self.queries and replace(self.queries, reach=reach))

    def reaching(self, reach: int) -> Form:
        """The same with so many keys before the slice alone."""
        return replace(self, keys=self.keys and replace(self.keys, reach=reach))

    def roles(self) -> Iterator[tuple[bool, TokenLayout]]:
        """(whether it holds the tokens before too, layout) of each axis that holds tokens."""
        if self.queries is not None:
            yield False, self.queries
        if self.keys is not None:
            yield True, self.keys

    def shape(self, shape: Shape, part: Slice) -> Shape:
        """The shape in a slice of a value of this shape."""
        sizes = list(shape)
        for prefix, layout in self.roles():
            sizes[layout.axis] = layout.size(part, prefix=prefix)
        if self.halo > 0 and self.queries is not None:
            sizes[self.queries.axis] += self.halo * self.queries.stride * self.queries.block
        return tuple(sizes)

    def moved(self, *, queries: int | None = None, keys: int | None = None) -> Form:
        """The same along other axes."""
        return replace(
            self,
            queries=self.queries and replace(self.queries, axis=self.queries.axis if queries is None else queries),
            keys=self.keys and replace(self.keys, axis=self.keys.axis if keys is None else keys),
        )


@dataclass(frozen=True, slots=True)
class TokenAxis:
    """What a planner has to know of a recipe.  tokens: of a sequence.  behind: ops that look at the tokens before their
    slice too.  once: those of the prologue.  Both sorted."""

    tokens: int
    behind: tuple[str, ...] = ()
    once: tuple[str, ...] = ()


WHOLE = Form()

# What a value holds that lies in the order of a sort, or says how others do.
SORTED = "sorted"  # entries of tokens in that order
KEYS = "keys"  # what was sorted
PLACES = "places"  # from where each entry came; in parts: of a vector with so many entries for each one
INVERSE = "inverse"  # to where each entry goes back
COUNTS = "counts"  # how many entries have each key; in parts: of so many keys
OFFSETS = "offsets"  # where the entries of each key end

# How the code of a slice runs an op otherwise than the captured program does.
PLAIN = ""
SIZES = "sizes"  # its sizes are those of the result in the slice
CAUSAL = "causal"  # attention that is causal by its argument: with a mask that says the same of the slice
LOSS = "loss"  # the mean of a loss function: the sum over the slice by the count of the whole sequence
MEAN = "mean"  # the sum over the slice by the size of the whole
MADE = "made"  # a constant of the captured shape, whatever it is made like
CARRY = "carry"  # a sum along the tokens: goes on where the slice before ended
PADDED = "padded"  # in front of the tokens of the slice those before it, and padding before the first
CONV = "conv"  # the same in a convolution that pads by itself
SHIFT = "shift"  # the tokens of the slice, each `amount` earlier
WINDOW = "window"  # of tokens with others in front those of the slice, from place `amount` on
DRAWN = "drawn"  # random: on the whole sequence, of which the slice takes its own
INVERT = "invert"  # the places to where sorted entries go back, from those that they came from
ONCE = "once"  # the operands that are whole count in the first slice alone
DIAGONAL = "diagonal"  # the diagonal moves with the start of the slice


@dataclass(frozen=True, slots=True)
class OpRecipe:
    """How the code of a slice runs an op.

    reads: what it needs of each tensor argument, in order; of a value that holds only its own tokens, keys means with
    those before it too.  how: one of the words above; amount: of tokens, where that needs one.
    """

    reads: tuple[Form, ...]
    how: str = PLAIN
    amount: int = 0


@dataclass(frozen=True, slots=True)
class Mask:
    """A value that hides keys: where it is False ("false"), True ("true"), or very negative ("negative")."""

    value: str
    queries: int | None
    keys: int | None
    hides: str


@dataclass(frozen=True, slots=True)
class Lift:
    """What else is added to scores, `factor` times: above `most` it undoes masks, up to `least` it hides as they do.
    queries, keys: its axes, None where it is the same for all of them."""

    value: str
    queries: int | None
    keys: int | None
    factor: float
    most: float
    least: float


@dataclass(frozen=True, slots=True)
class Guard:
    """Every query must see a key that is not after it, whatever the inputs: else the captured program would spread
    its attention over all keys, later ones too.  Checked of each batch, for the masks together; and that masks of
    finite numbers hide what is later, whatever was added to them: lifts are what else is added to the scores."""

    masks: tuple[Mask, ...]
    op: str
    lifts: tuple[Lift, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How a model runs slice by slice.

    tokens: of the sequence.  forms: of every value that is not of the prologue.  prologue: ops that depend on inputs
    and constants alone: they run at full length, once a micro-batch.  ops: how every other op is run, where it can be.
    chain: for a value that only rearranges or repeats elements of another, that one: K and V may be kept as any of
    them.  guards: what must hold of each batch.  reach: of values that are needed with the tokens before the slice, how
    many of these are; all of those of others.  constants: buffers on the numbers of which all this rests.
    """

    tokens: int
    forms: Mapping[str, Form]
    prologue: frozenset[str]
    ops: Mapping[str, OpRecipe]
    chain: Mapping[str, str] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    reach: Mapping[str, int] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()

    def axis(self, ops: Iterable[Op]) -> TokenAxis:
        """What a planner has to know, of the ops of the captured graph."""
        behind = []
        for op in ops:
            recipe = self.ops.get(op.name)
            forms = [self.form(name) for name in op.writes]
            reads = recipe.reads if recipe is not None else ()
            if any(form.keys is not None for form in (*forms, *reads)):
                behind.append(op.name)
        return TokenAxis(self.tokens, tuple(sorted(behind)), tuple(sorted(self.prologue)))

    def form(self, value: str) -> Form:
        """The form of a value; what the prologue makes, inputs and parameters are whole."""
        return self.forms.get(value, WHOLE)
