"""One op as the rules of the loss analysis see it: its arguments at two numbers of rows, and the kinds so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from autopart.ir.graph import Literal, Op, Param, Value
from autopart.passes.loss.placement import (
    CONSTANT,
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    Placement,
    coupled,
    same_outer,
    unproven,
)
from autopart.passes.ops.table import op_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpContext:
    """op and twin: the op in both captures, of `rows` and `twin_rows` rows.  kinds: of all values written so far."""

    op: Op
    twin: Op
    rows: int
    twin_rows: int
    values: Mapping[str, Value]
    twins: Mapping[str, Value]
    params: Mapping[str, Param]
    kinds: Mapping[str, Placement]

    @property
    def name(self) -> str:
        """The op's own name."""
        return op_name(self.op.target)

    def arg(self, key: str, default: Literal = None) -> Literal:
        """An argument by its name."""
        return next((value for name, value in self.op.attrs if name == key), default)

    def twin_arg(self, key: str, default: Literal = None) -> Literal:
        """The same argument in the other capture."""
        return next((value for name, value in self.twin.attrs if name == key), default)

    def number(self, key: str, default: int) -> int:
        """An argument that is an int."""
        value = self.arg(key, default)
        return value if isinstance(value, int) else default

    def is_tensor(self, ref: Literal) -> bool:
        """True for "%name"."""
        return isinstance(ref, str) and ref.startswith("%")

    def kind(self, ref: Literal) -> Placement:
        """Kind of an operand given as "%name"; plain literals and parameters are constants."""
        if isinstance(ref, str) and ref.startswith("%"):
            return self.kinds.get(ref[1:], CONSTANT)
        return CONSTANT

    def argument_kind(self, key: str) -> Placement:
        """Kind of an argument: of its tensor, or of a number, which may change with the number of rows."""
        ref = self.arg(key)
        return self.kind(ref) if self.is_tensor(ref) else Placement(REPLICATE, self.growth(ref, self.twin_arg(key)))

    def growth(self, mine: Literal, theirs: Literal) -> int:
        """The power of R that a number grows with, from its values in both captures."""
        if mine == theirs:
            return 0
        if isinstance(mine, (int, float)) and isinstance(theirs, (int, float)) and mine and theirs:
            ratio, step = mine / theirs, self.rows / self.twin_rows
            for power in (1, -1, 2, -2):
                if math.isclose(ratio, step**power, rel_tol=1e-9):
                    return power
        raise coupled(f"the number {mine!r} in the program is {theirs!r} at {self.twin_rows} rows")

    def shape(self, ref: Literal) -> Shape:
        """Shape of an operand given as "%name"; () for a number."""
        if not isinstance(ref, str) or not ref.startswith("%"):
            return ()
        name = ref[1:]
        return self.values[name].shape if name in self.values else self.params[name].shape

    def dtype(self, ref: Literal) -> str:
        """dtype of an operand given as "%name"."""
        assert isinstance(ref, str)
        name = ref[1:]
        return self.values[name].dtype if name in self.values else self.params[name].dtype

    def tensors(self) -> list[str]:
        """Every tensor argument, "%name", in order; those in lists too."""
        found: list[str] = []
        for _, value in self.op.attrs:
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, str) and item.startswith("%"):
                    found.append(item)
        return found

    @property
    def out(self) -> Value:
        """The first result."""
        return self.values[self.op.writes[0]]

    def differs(self, key: str) -> bool:
        """True when an argument is another one at the other number of rows."""
        return self.arg(key) != self.twin_arg(key)


def aligned(operands: list[tuple[Placement, int]], out_ndim: int) -> tuple[int, int]:
    """Axis and layout of the rows in the result of broadcasting; operands: kinds with their numbers of axes.

    Raises when the rows of two operands do not lie along the same axis.
    """
    rows = [(kind, kind.axis - ndim + out_ndim) for kind, ndim in operands if kind.tag == SHARD]
    axes = {axis for _, axis in rows}
    if len(axes) != 1:
        raise coupled("it combines every row of the batch with every other")
    return axes.pop(), same_outer([kind for kind, _ in rows])


def rows_of(kind: Placement, axis: int, outer: int | None = None) -> Placement:
    """`kind` along another axis."""
    return Placement(SHARD, kind.scale, kind.count, axis, kind.outer if outer is None else outer)


def positive(axis: int, ndim: int) -> int:
    """An axis counted from the left."""
    return axis + ndim if axis < 0 else axis


def ints(value: Literal) -> tuple[int, ...]:
    """One int or several, as a tuple."""
    if isinstance(value, int):
        return (value,)
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()


def fits(kind: Placement, value: Value, twin: Value, rows: int, twin_rows: int) -> bool:
    """True when a derived kind agrees with the shapes of both captures: a cross-check of every rule."""
    if kind.tag in (SHARD, INDEX):
        if value.rows_axis != kind.axis:
            return False
        block = Fraction(value.shape[kind.axis], rows * max(1, kind.outer))
        other = Fraction(twin.shape[kind.axis], twin_rows * max(1, kind.outer))
        return block == other and block.denominator == 1
    if kind.tag in (REPLICATE, PARTIAL):
        return value.shape == twin.shape
    return True


def contains_rows(kinds: list[Placement]) -> bool:
    """True when any is along the rows."""
    return any(k.tag == SHARD for k in kinds)


def not_index(kinds: list[Placement]) -> None:
    """Raise when an operand counts rows."""
    if any(k.tag == INDEX for k in kinds):
        raise unproven("it computes with the number of the row in the micro-batch")
