"""How a value of a micro-batch relates to the same value of the whole batch: the lattice of the loss analysis.

R is the number of rows of the (micro-)batch.  With f = R^-scale, times `count` where one is given, the value v is

    CONST      f*v is the same for every micro-batch (a parameter, a mask, a number in the program)
    ROWS       f*v of a micro-batch is a slice of f*v of the whole batch, along `axis`
    ADD        f*v of the whole batch is the sum of those of the micro-batches
    INDEX      v holds the number of the row, counted from the start of the micro-batch
    UNPROVEN   an op that the rules do not know; a numeric test may show that the value is ROWS
    COUPLED    it depends on rows of other micro-batches, or on how many there are, in no way that can be undone

So a sum over rows is ADD with scale 0; a mean over rows is ADD with scale -1 (R*v adds up); a token mean is ADD with
the count of tokens.  Rows along an axis: the axis has size outer * R * inner, and an element's row is the middle
index: flattening (batch, sequence) gives outer 1, flattening (sequence, batch) gives outer = sequence.  outer 0 stands
for "any": every row holds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

REPLICATE, SHARD, PARTIAL, INDEX, UNPROVEN, COUPLED = "const", "rows", "add", "index", "unproven", "coupled"


@dataclass(frozen=True, slots=True)
class Count:
    """A divisor that depends on the batch: elements of `value` that differ from `ignore`, or (None) its sum."""

    value: str
    ignore: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """One element of the lattice; the module docstring says what the fields mean.

    witness: for ADD with scale -1, a value whose elements add up to R*v times a constant.  zero: for CONST, v is 0.
    gated: for UNPROVEN, what it holds may hinge on a comparison of unproven values, which data rarely shows.
    why: for COUPLED and UNPROVEN, the reason; op: the op where it began.
    """

    tag: str
    scale: int = 0
    count: Count | None = None
    axis: int = -1
    outer: int = 0
    witness: str | None = None
    zero: bool = False
    gated: bool = False
    why: str = ""
    op: str = ""

    @property
    def plain(self) -> bool:
        """True when v itself, without a factor, is const, a slice or a sum."""
        return self.scale == 0 and self.count is None


CONSTANT = Placement(REPLICATE)


class RuleExit(Exception):
    """Ends a rule early with the kind that all results of the op have."""

    def __init__(self, kind: Placement) -> None:
        self.kind = kind
        super().__init__(kind.why)


def coupled(why: str) -> RuleExit:
    """The op couples rows for a known reason."""
    return RuleExit(Placement(COUPLED, why=why))


def unproven(why: str) -> RuleExit:
    """The rules cannot tell whether the op couples rows."""
    return RuleExit(Placement(UNPROVEN, why=why))


def multiplied(kinds: list[Placement]) -> tuple[int, Count | None]:
    """Scale and count of a product: scales add up, and at most one factor may have a count."""
    counts = [k.count for k in kinds if k.count is not None]
    if len(counts) > 1:
        raise coupled("it multiplies two values that were divided by counts of the batch")
    return sum(k.scale for k in kinds), counts[0] if counts else None


def need_plain(kinds: list[Placement], doing: str = "it is not linear in") -> None:
    """Raise unless no operand is a sum or mean over rows, or was scaled by a number of rows."""
    for kind in kinds:
        if kind.tag == INDEX:
            raise unproven("it computes with the number of the row in the micro-batch")
        if kind.tag == PARTIAL:
            raise coupled(f"{doing} a sum or mean over the rows of the batch")
        if not kind.plain:
            raise coupled(f"{doing} a value that was scaled by the size of the batch")


def same_outer(kinds: list[Placement]) -> int:
    """The common layout of the rows axis; raises when two differ."""
    outers = {k.outer for k in kinds} - {0}
    if len(outers) > 1:
        raise unproven("its operands hold the rows in different orders")
    return outers.pop() if outers else 0


def added(kinds: list[Placement]) -> Placement:
    """Kind of a sum (or concatenation) of ADD and CONST terms.

    A constant term is harmless in a mean and repeated once per micro-batch in a sum, unless it grows with the batch
    itself: v + c keeps factor f when f*c adds up too, so c needs one power of R more than v, or v a count.
    """
    sums = [k for k in kinds if k.tag == PARTIAL]
    first = sums[0]
    kinds = [k for k in kinds if not k.zero]
    for kind in sums[1:]:
        if (kind.scale, kind.count) != (first.scale, first.count):
            raise coupled("it adds terms that are averaged over different things")
    for kind in kinds:
        if kind.tag != REPLICATE:
            continue
        grows = kind.scale == first.scale + (first.count is None) and kind.count is None
        if not (grows or (kind.scale, kind.count) == (first.scale + 1, first.count)):
            raise coupled("it adds a term that does not depend on the batch to a sum over the batch")
    return Placement(PARTIAL, first.scale, first.count)
