"""The model and one op of it as the rules see them, at two lengths of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autopart.ir.graph import Graph, Op, Param, Value
from autopart.passes.ops.context import OpCall
from autopart.passes.ops.flops import operands
from autopart.passes.ops.letters import Letters, Shape, letters
from autopart.passes.tokens.recipe import WHOLE, Form, OpRecipe, TokenLayout


class Numbers(Protocol):
    """What only running ops can show."""

    def of(self, value: str) -> np.ndarray | None:
        """The numbers of a value that depends on constants alone; None where they cannot be known."""

    def which(self, value: str) -> int:
        """The place of a value among the results of its op."""

    def apart(self, op: str, reads: Sequence[Form], form: Form) -> bool:
        """Whether an op without a rule made, of the tokens of a slice, those of its result, with their gradients, for
        every slice that was tried."""


@dataclass(eq=False)
class Refused(Exception):
    """Ends a rule: the op cannot run slice by slice."""

    why: str
    fix: str = ""


class Model:
    """A model at `tokens` and at `fewer` tokens, and what is known of its values so far.

    forms: of the values that are not made by the prologue.  full: inputs and what the prologue makes.  fixed: constants
    and what depends on them alone.
    """

    def __init__(self, graph: Graph, other: Graph, tokens: int, fewer: int, numbers: Numbers) -> None:
        self.graph, self.tokens, self.fewer, self.numbers = graph, tokens, fewer, numbers
        self._values: dict[str, Value | Param] = {**graph.param_map(), **graph.value_map()}
        self._other_values: dict[str, Value | Param] = {**self._values, **other.value_map()}
        self.ops, self.twins = graph.op_map(), other.op_map()
        self.writer: Mapping[str, Op] = {name: op for op in graph.ops for name in op.writes}
        self.full: set[str] = set()
        self.fixed: set[str] = set()
        self.forms: dict[str, Form] = {}

    def shape(self, name: str) -> Shape:
        """Shape of a value or parameter."""
        return self._values[name].shape

    def dtype(self, name: str) -> str:
        """Type of a value or parameter."""
        return self._values[name].dtype

    def form(self, name: str) -> Form:
        """The form of a value; inputs, parameters and what the prologue makes are whole."""
        return self.forms.get(name, WHOLE)

    def varying(self, name: str) -> tuple[int, ...]:
        """The axes that grow with the tokens."""
        pairs = zip(self.shape(name), self._other_values[name].shape, strict=True)
        return tuple(axis for axis, (a, b) in enumerate(pairs) if a != b)

    def growth(self, name: str, axis: int) -> int:
        """The number of entries that an axis has more at `tokens` than at `fewer` tokens."""
        return self.shape(name)[axis] - self._other_values[name].shape[axis]

    def layout(self, name: str, axis: int) -> TokenLayout | None:
        """How an axis of a whole value may be cut into tokens; of a merged one the tokens are taken to lie last."""
        size = self.shape(name)[axis]
        stride, rest = divmod(self.growth(name, axis), self.tokens - self.fewer)
        if rest or stride < 1 or size % stride:
            return None
        short = self.tokens - size // stride
        return TokenLayout(axis, stride, 1, short) if 0 <= short < self.fewer else None

    def full_size(self, layout: TokenLayout) -> int:
        """The size of the axis in the captured program."""
        return layout.stride * (self.tokens - layout.short) * layout.block

    def fits(self, name: str, form: Form) -> bool:
        """Whether a form agrees with the shapes of both captures: a cross-check of every rule."""
        sizes, others = list(self.shape(name)), list(self._other_values[name].shape)
        for _, layout in form.roles():
            if layout.axis >= len(sizes) or sizes[layout.axis] != self.full_size(layout):
                return False
            if others[layout.axis] != layout.stride * (self.fewer - layout.short) * layout.block:
                return False
            sizes[layout.axis] = others[layout.axis] = 0
        return form.whole or sizes == others


class TokenOp(OpCall):
    """An op at two lengths, and its operands: names, shapes and forms."""

    def __init__(self, model: Model, op: Op) -> None:
        super().__init__(op, model.twins[op.name])
        self.model = model
        self.refs = [ref[1:] for ref in operands(op)]
        self.shapes = [model.shape(ref) for ref in self.refs]
        self.forms = [model.form(ref) for ref in self.refs]

    @property
    def shape(self) -> Shape:
        """Shape of the first result."""
        return self.model.shape(self.op.writes[0])

    @property
    def dtype(self) -> str:
        """Type of the first result."""
        return self.model.dtype(self.op.writes[0])

    def letters(self) -> Letters | None:
        """Names of the axes of its operands and results, where they are known."""
        return letters(self.row, self.attrs, self.shapes, self.shape)

    def recipe(self, form: Form, reads: Sequence[Form] | None = None, how: str = "", amount: int = 0) -> OpRecipe:
        """A recipe with one form for all results.  reads: the forms of the operands where it is left out."""
        return OpRecipe(tuple(self.forms if reads is None else reads), dict.fromkeys(self.op.writes, form), how, amount)
