"""One op as the rules see it: its row of the table, its arguments at two lengths, the forms of its operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Literal, Op, Param, Value
from autopart.passes.ops.flops import operands
from autopart.passes.ops.letters import Letters, Shape, letters
from autopart.passes.ops.row import OpRow
from autopart.passes.ops.table import op_name, row_of
from autopart.passes.tokens.recipe import WHOLE, Form, OpRecipe, TokenLayout


class Numbers(Protocol):
    """What only running ops can tell."""

    def of(self, value: str) -> np.ndarray | None:
        """The numbers of a value that depends on constants alone; None where they cannot be known."""

    def which(self, value: str) -> int:
        """Which of the results of its op a value is."""

    def apart(self, op: str, reads: Sequence[Form], form: Form) -> bool:
        """Whether an op that no rule knows was seen to make of the tokens of a slice those of its result, with their
        gradients, for every slice that was tried."""


class Refused(Exception):
    """Ends a rule: the op cannot run slice by slice.  why: in words; op: that it comes from, if not this one."""

    def __init__(self, why: str, fix: str = "") -> None:
        self.why, self.fix = why, fix
        super().__init__(why)


@dataclass(frozen=True)
class Found:
    """What a rule finds: the form of each result (one stands for all), and how the op is run."""

    forms: tuple[Form, ...]
    recipe: OpRecipe


@dataclass
class Model:
    """A model at `tokens` and at `fewer` tokens, and what is known of its values so far.

    forms: of values that are not of the prologue; refused: why a value has none.  full: values of the prologue, and
    inputs.  fixed: of those the ones that do not depend on inputs.
    """

    graph: Graph
    other: Graph
    tokens: int
    fewer: int
    numbers: Numbers
    values: Mapping[str, Value] = field(init=False)
    other_values: Mapping[str, Value] = field(init=False)
    params: Mapping[str, Param] = field(init=False)
    writer: dict[str, Op] = field(default_factory=dict)
    twins: dict[str, Op] = field(default_factory=dict)
    op_names: dict[str, str] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    fixed: set[str] = field(default_factory=set)
    forms: dict[str, Form] = field(default_factory=dict)
    refused: dict[str, RefusedError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values, self.other_values = self.graph.value_map(), self.other.value_map()
        self.params = self.graph.param_map()
        for op, twin in zip(self.graph.ops, self.other.ops, strict=True):
            self.twins[op.name] = twin
            self.op_names[op.name] = op_name(op.target)
            for written in op.writes:
                self.writer[written] = op

    def shape(self, name: str) -> Shape:
        """Shape of a value or parameter."""
        return self.values[name].shape if name in self.values else self.params[name].shape

    def op_of(self, name: str) -> Op | None:
        """An op by its name."""
        twin = self.twins.get(name)
        return self.writer.get(twin.writes[0]) if twin is not None and twin.writes else None

    def form(self, name: str) -> Form:
        """What a slice holds of a value that is not refused."""
        return self.forms.get(name, WHOLE)

    def varying(self, name: str) -> tuple[int, ...]:
        """The axes that grow with the tokens."""
        if name not in self.values:
            return ()
        pairs = zip(self.values[name].shape, self.other_values[name].shape, strict=True)
        return tuple(axis for axis, (a, b) in enumerate(pairs) if a != b)

    def dtype(self, name: str) -> str:
        """Of a value or a parameter."""
        found = self.values.get(name)
        return found.dtype if found is not None else self.params[name].dtype

    def layout(self, name: str, axis: int) -> TokenLayout | None:
        """How an axis of a whole value may be cut into tokens; of a merged one the tokens are taken to lie last."""
        size, other = self.values[name].shape[axis], self.other_values[name].shape[axis]
        stride, rest = divmod(size - other, self.tokens - self.fewer)
        if rest or stride < 1 or size % stride:
            return None
        short = self.tokens - size // stride
        return TokenLayout(axis, stride, 1, short) if 0 <= short < self.fewer else None

    def full_size(self, layout: TokenLayout) -> int:
        """The size of the axis in the captured program."""
        return layout.stride * (self.tokens - layout.short) * layout.block

    def fits(self, name: str, form: Form) -> bool:
        """Whether a form agrees with the shapes of both captures: a cross-check of every rule."""
        sizes, others = list(self.values[name].shape), list(self.other_values[name].shape)
        for _, layout in form.roles():
            if layout.axis >= len(sizes) or sizes[layout.axis] != self.full_size(layout):
                return False
            if others[layout.axis] != layout.stride * (self.fewer - layout.short) * layout.block:
                return False
            sizes[layout.axis] = others[layout.axis] = 0
        return form.whole or sizes == others


class TokenOp:
    """An op, with everything that rules ask of it."""

    def __init__(self, model: Model, op: Op) -> None:
        self.model, self.op, self.twin = model, op, model.twins[op.name]
        self.name, self.row = op_name(op.target), row_of(op.target)
        self.attrs = dict(op.attrs)
        self.refs = [ref[1:] for ref in operands(op)]
        self.forms = [model.forms.get(ref, WHOLE) for ref in self.refs]

    row: OpRow

    @property
    def out(self) -> Value:
        """The first result."""
        return self.model.values[self.op.writes[0]]

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

    def differing(self) -> set[str]:
        """Arguments that change with the number of tokens."""
        return {key for (key, mine), (_, theirs) in zip(self.op.attrs, self.twin.attrs, strict=True) if mine != theirs}

    def letters(self) -> Letters | None:
        """Names of the axes of its operands and results, where they are known."""
        return letters(self.row, self.attrs, [self.model.shape(ref) for ref in self.refs], self.out.shape)

    def found(self, form: Form, reads: tuple[Form, ...], how: str = "", amount: int = 0) -> Found:
        """One form for every result."""
        return Found((form,) * len(self.op.writes), OpRecipe(reads, how, amount))

    def fits(self, name: str, form: Form) -> bool:
        """`Model.fits`."""
        return self.model.fits(name, form)


def before(shape: Shape, axis: int) -> int:
    """How many elements stand for one of this axis in the axes before it."""
    return math.prod(shape[:axis])
