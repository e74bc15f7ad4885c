"""One op as the rules of an analysis see it: its row of the table, and its arguments in two captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopart.ir.graph import Literal, Op, Param, Value, alike
from autopart.passes.ops.flops import operands
from autopart.passes.ops.letters import Letters, Shape, letters
from autopart.passes.ops.placement import CONSTANT, REPLICATE, RowPlacement, coupled
from autopart.passes.ops.table import op_name, row_of


class OpCall:
    """An op in two captures of a model, with its row of the table and its arguments by name."""

    def __init__(self, op: Op, other_op: Op) -> None:
        self.op, self.name, self.row = op, op_name(op.target), row_of(op.target)
        self.attrs, self.other_attrs = dict(op.attrs), dict(other_op.attrs)

    def arg(self, key: str, default: Literal = None) -> Literal:
        """An argument by its name."""
        return self.attrs.get(key, default)

    def ref(self, key: str) -> str | None:
        """The name of a tensor argument."""
        value = self.attrs.get(key)
        return value[1:] if isinstance(value, str) and value.startswith("%") else None

    def number(self, key: str, default: int) -> int:
        """An argument that is an int."""
        value = self.attrs.get(key, default)
        return value if type(value) is int else default

    def axis(self, key: str, ndim: int, default: int = 0) -> int:
        """An argument that names an axis, counted from the left."""
        axis = self.number(key, default)
        return axis + ndim if axis < 0 else axis

    def picks(self, ndim: int) -> dict[int, str]:
        """The tensors that index an operand of `ndim` axes, by axis, of index_select, x[i, j] and x[i, j] = y."""
        if self.name == "index_select":
            return {self.axis("dim", ndim): operands(self.op)[1]}
        picks = self.arg("indices")
        assert isinstance(picks, tuple)
        return {axis: pick for axis, pick in enumerate(picks) if isinstance(pick, str)}

    def differs(self, key: str) -> bool:
        """Whether an argument differs between the captures."""
        return not alike(self.attrs.get(key), self.other_attrs.get(key))

    def differing(self) -> set[str]:
        """Arguments that differ between the captures."""
        return {key for key in self.attrs if self.differs(key)}


class OpContext(OpCall):
    """An op in two captures, of `rows` and `other_rows` rows.  placements: of all values written so far."""

    def __init__(
        self,
        op: Op,
        other_op: Op,
        rows: int,
        other_rows: int,
        values: Mapping[str, Value],
        other_values: Mapping[str, Value],
        params: Mapping[str, Param],
    ) -> None:
        super().__init__(op, other_op)
        self.rows, self.other_rows, self.values, self.other_values = rows, other_rows, values, other_values
        self.params = params
        self.placements: Mapping[str, RowPlacement] = {}

    @property
    def out(self) -> Value:
        """The first result."""
        return self.values[self.op.writes[0]]

    def letters(self) -> Letters | None:
        """Names of the axes of its operands and results, where they are known."""
        shapes = [self.shape(ref) for ref in self.tensors()]
        return letters(self.row, self.attrs, shapes, self.out.shape)

    def is_tensor(self, ref: Literal) -> bool:
        """Whether an argument is a tensor ("%name")."""
        return isinstance(ref, str) and ref.startswith("%")

    def tensors(self) -> list[str]:
        """Every tensor argument in order, those in lists too, as "%name"."""
        return operands(self.op)

    def first(self) -> tuple[str, RowPlacement]:
        """The first tensor argument and its placement."""
        ref = self.tensors()[0]
        return ref, self.placement(ref)

    def placement(self, ref: Literal) -> RowPlacement:
        """The placement of a tensor argument.  Running statistics that a norm only writes count as constants."""
        own_statistics = self.arg("training") is True or self.arg("use_input_stats") is True
        written = (self.arg("running_mean"), self.arg("running_var")) if own_statistics else ()
        return CONSTANT if not isinstance(ref, str) or ref in written else self.placements.get(ref[1:], CONSTANT)

    def argument(self, key: str) -> RowPlacement:
        """The placement of an argument by its name; a number may change with a power of the number of rows."""
        ref = self.arg(key)
        if self.is_tensor(ref):
            return self.placement(ref)
        return RowPlacement(REPLICATE, self.growth(ref, self.other_attrs.get(key)))

    def growth(self, mine: Literal, other: Literal) -> int:
        """The power of the number of rows that an argument is proportional to."""
        if alike(mine, other):
            return 0
        if isinstance(mine, (int, float)) and isinstance(other, (int, float)) and mine and other:
            ratio, step = mine / other, self.rows / self.other_rows
            for power in (1, -1, 2, -2):
                if math.isclose(ratio, step**power, rel_tol=1e-9):
                    return power
        raise coupled(f"the number {mine!r} in the program is {other!r} at {self.other_rows} rows")

    def shape(self, ref: Literal) -> Shape:
        """The shape of an operand given as "%name"; () for a number."""
        if not isinstance(ref, str) or not ref.startswith("%"):
            return ()
        name = ref[1:]
        return self.values[name].shape if name in self.values else self.params[name].shape

    def dtype(self, ref: Literal) -> str:
        """The dtype of an operand given as "%name"."""
        assert isinstance(ref, str)
        name = ref[1:]
        return self.values[name].dtype if name in self.values else self.params[name].dtype


def around_indices(axes: Sequence[int], ndim: int) -> tuple[int, Callable[[int], int]]:
    """Where the result of indexing these axes, ascending, by indices of `ndim` axes holds what was picked, and where it
    holds an axis that is not indexed.

    What is picked lies where the indices lie if those are next to each other, else in front.
    """
    adjacent = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    start = axes[0] if adjacent else 0

    def moved(axis: int) -> int:
        kept = sum(before not in axes for before in range(axis))
        return kept + ndim if not adjacent or axis > start else kept

    return start, moved
