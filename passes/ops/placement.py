"""How a value of a micro-batch relates to that value of the whole batch: the lattice of the loss analysis.

R is the number of rows of the (micro-)batch.  With f = R^-scale, times `count` if there is one, the value v is

    REPLICATE  f*v is the same for every micro-batch (a parameter, a mask, a number in the program)
    SHARD      f*v of a micro-batch is a slice of f*v of the whole batch, along `axis`
    PARTIAL    f*v of the whole batch is the sum of those of the micro-batches
    TERMS      a linear combination of values of the three kinds above with different factors
    INDEX      v holds the number of the row, counted from the start of the micro-batch
    UNPROVEN   the result of an op without a rule; a numeric test may show that the value is SHARD
    COUPLED    it depends on rows of other micro-batches, or on their number, and no weight can undo that

So a sum over rows is PARTIAL with scale 0; a mean over rows is PARTIAL with scale -1 (R*v adds up); a token mean is
PARTIAL with the count of tokens.  Rows along an axis: the axis has size stride_factor * R * inner, and an element's row
is the middle index: flattening (batch, sequence) gives stride_factor 1, flattening (sequence, batch) gives
stride_factor = sequence.  stride_factor 0 means that all rows are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopart.ir.graph import LossReduction

REPLICATE, SHARD, PARTIAL, TERMS = "const", "rows", "add", "terms"
INDEX, UNPROVEN, COUPLED = "index", "unproven", "coupled"


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """One element of the lattice, see the module docstring.

    witness: for PARTIAL with scale -1, a value whose elements add up to R*v times a constant.  zero: for REPLICATE, v
    is 0.  gated: for UNPROVEN, v depends on a comparison of unproven values, or on another op of which a test
    on numbers may miss the effect.  why: for COUPLED and UNPROVEN, the reason; op: the op that is the cause.
    """

    tag: str
    scale: int = 0
    count: LossReduction | None = None
    axis: int = -1
    stride_factor: int = 0
    witness: str | None = None
    zero: bool = False
    gated: bool = False
    why: str = ""
    op: str = ""

    @property
    def plain(self) -> bool:
        """Whether f is 1."""
        return self.scale == 0 and self.count is None

    @property
    def factor(self) -> tuple[int, LossReduction | None]:
        """The two parts of f."""
        return self.scale, self.count

    @property
    def has_rows(self) -> bool:
        """Whether v holds rows of the batch, or their numbers, along `axis`."""
        return self.tag in (SHARD, INDEX)

    def along(self, axis: int, stride_factor: int | None = None) -> RowPlacement:
        """This placement with its rows along another axis."""
        factor = self.stride_factor if stride_factor is None else stride_factor
        return RowPlacement(self.tag, self.scale, self.count, axis, factor)


CONSTANT = RowPlacement(REPLICATE)


@dataclass(eq=False)
class RuleExit(Exception):
    """Ends a rule early with the placement that all results of the op have."""

    placement: RowPlacement


def coupled(why: str) -> RuleExit:
    """The exit for an op that couples rows."""
    return RuleExit(RowPlacement(COUPLED, why=why))


def unproven(why: str) -> RuleExit:
    """The exit for an op that may couple rows."""
    return RuleExit(RowPlacement(UNPROVEN, why=why))


def multiplied(factors: Iterable[RowPlacement]) -> tuple[int, LossReduction | None]:
    """The scale and count of a product: scales add up, and at most one factor may have a count."""
    factors = list(factors)
    counts = [placement.count for placement in factors if placement.count is not None]
    if len(counts) > 1:
        raise coupled("it multiplies two values that were divided by counts of the batch")
    return sum(placement.scale for placement in factors), counts[0] if counts else None


def need_plain(operands: Iterable[RowPlacement]) -> None:
    """Refuse operands that are row numbers, sums over rows, or scaled by a number of rows."""
    for placement in operands:
        if placement.tag == INDEX:
            raise unproven("it computes with the number of the row in the micro-batch")
        if placement.tag == PARTIAL:
            raise coupled("it is not linear in a sum or mean over the rows of the batch")
        if not placement.plain:
            raise coupled("it is not linear in a value that was scaled by the size of the batch")


def same_stride(operands: Iterable[RowPlacement]) -> int:
    """The common stride factor of the operands; raises if two differ."""
    factors = {placement.stride_factor for placement in operands} - {0}
    if len(factors) > 1:
        raise unproven("its operands hold the rows in different orders")
    return factors.pop() if factors else 0


def added(terms: list[RowPlacement]) -> RowPlacement:
    """The placement of a sum (or concatenation) of PARTIAL and REPLICATE terms.

    A constant term is harmless in a mean and repeated once per micro-batch in a sum, unless it grows with the batch
    itself: v + c keeps factor f when f*c adds up too, so c needs one power of R more than v, or v a count.
    """
    first = next(term for term in terms if term.tag == PARTIAL)
    for term in terms:
        if term.tag == PARTIAL and term.factor != first.factor:
            return RowPlacement(TERMS)
        if term.tag != REPLICATE or term.zero:
            continue
        grows = term.factor == (first.scale + (1 if first.count is None else 0), None)
        if not (grows or term.factor == (first.scale + 1, first.count)):
            return RowPlacement(TERMS)
    return RowPlacement(PARTIAL, first.scale, first.count)
