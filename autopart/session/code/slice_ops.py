"""How each op is written in the code of a slice (`passes.tokens.recipe.OpRecipe`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopart.ir.graph import Op
from autopart.passes.ops.table import op_name
from autopart.passes.tokens import recipe as words
from autopart.passes.tokens.recipe import Form, OpRecipe, Slice
from autopart.runtime.stages.slice_functions import Places, Rows, causal_attention, counted, drawn, part_of
from autopart.session.code.stage_graph import draw_for_all

_aten = torch.ops.aten


def narrowed(graph: fx.Graph, node: fx.Node, want: Form, part: Slice) -> fx.Node:
    """A whole value cut to the tokens that are wanted of it."""
    for prefix, layout in want.roles():
        low, high = layout.bounds(part, prefix=prefix)
        most = part.tokens - layout.short
        if (low, high) != (0, most):
            node = graph.call_function(part_of, (node, layout.axis, layout.stride, most, low, high))
    return node


def emit(builder: Any, node: fx.Node, op: Op, *, prefix: bool = False) -> fx.Node:
    """Write an op; prefix: on the tokens before the slice too."""
    return _Writer(builder, node, op, prefix).node()


class _Writer:
    def __init__(self, builder: Any, node: fx.Node, op: Op, prefix: bool) -> None:
        self._builder, self._node, self._op, self._prefix = builder, node, op, prefix
        self._graph: fx.Graph = builder.graph
        self._part: Slice = builder.part
        self._recipe: OpRecipe = builder.needs.recipe.ops[op.name]

    def node(self) -> fx.Node:
        how = self._recipe.how
        write: Callable[[], fx.Node] = {
            words.PLAIN: self._plain,
            words.SIZES: self._sizes,
            words.CAUSAL: self._causal,
            words.LOSS: self._loss,
            words.MEAN: self._mean,
            words.MADE: self._made,
            words.ONCE: self._once,
            words.DIAGONAL: self._diagonal,
            words.CARRY: self._carry,
            words.PADDED: self._padded,
            words.CONV: self._convolution,
            words.SHIFT: self._shift,
            words.WINDOW: self._window,
            words.INVERT: self._invert,
            words.DRAWN: self._drawn,
        }[how]
        return write()

    def _read(self, arg: fx.Node, want: Form, *, prefix: bool) -> fx.Node:
        """What the op reads of a value, with what weighs it."""
        found: fx.Node = self._builder.read(arg, want, prefix=prefix)
        number = self._builder.needs.reads.get((self._node, arg))
        if number is None:
            return found
        return self._graph.call_function(number.adjust, (found, self._builder.numbers[number.place]))

    def _arguments(self) -> dict[str, Any]:
        """Arguments by name, with nodes of the slice in place of the captured ones."""
        reads = iter(self._recipe.reads)

        def read(arg: fx.Node) -> fx.Node:
            return self._read(arg, next(reads), prefix=self._prefix)

        args, kwargs = fx.node.map_arg((tuple(self._node.args), dict(self._node.kwargs)), read)
        target: Any = self._node.target
        names = [argument.name for argument in target._schema.arguments]
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: self._builder.device if isinstance(arg, torch.device) else arg for name, arg in found.items()}

    def _call(self, target: Any, arguments: dict[str, Any]) -> fx.Node:
        """A call with its leading arguments by place, as they are captured, and the rest by name."""
        args: list[Any] = []
        for argument in target._schema.arguments:
            if argument.kwarg_only or argument.name not in arguments:
                break
            args.append(arguments[argument.name])
        taken = {argument.name for argument in target._schema.arguments[: len(args)]}
        rest = {name: value for name, value in arguments.items() if name not in taken}
        return self._graph.call_function(target, tuple(args), rest)

    def _plain(self) -> fx.Node:
        if isinstance(self._node.target, torch._ops.OpOverload):
            return self._call(self._node.target, self._arguments())
        reads = iter(self._recipe.reads)  # a random op of whole operands: every slice draws the same
        copy = self._graph.node_copy(self._node, lambda arg: self._read(arg, next(reads), prefix=self._prefix))
        if self._node in self._builder.needs.drawn:
            draw_for_all(copy, self._builder.needs.drawn[self._node])
        return copy

    def _shape(self) -> tuple[int, ...]:
        """Of the result in the slice."""
        written = self._op.writes[0]
        form: Form = self._builder.needs.recipe.form(written)
        if self._prefix:
            form = form.as_prefix(self._builder.needs.recipe.reach.get(written))
        return form.shape(self._builder.needs.shapes[written], self._part)

    def _sizes(self) -> fx.Node:
        arguments, shape, name = self._arguments(), self._shape(), op_name(self._op.target)
        first = next(iter(arguments.values()))
        if name in ("unsqueeze", "squeeze", "split", "chunk", "split_with_sizes"):
            return self._call(self._node.target, arguments)
        if name in ("expand", "broadcast_to"):
            return self._graph.call_function(_aten.expand.default, (first, list(shape)))
        if name in ("slice", "narrow"):
            axis = self._recipe.reads[0].queries or self._recipe.reads[0].keys
            assert axis is not None
            if not self._recipe.amount:
                return self._graph.call_function(_aten.alias.default, (first,))
            return self._graph.call_function(_aten.slice.Tensor, (first, axis.axis, 0, shape[axis.axis]))
        return self._graph.call_function(_aten.reshape.default, (first, list(shape)))

    def _causal(self) -> fx.Node:
        arguments = self._arguments()
        return self._graph.call_function(causal_attention, (), {**arguments, "start": self._part.start})

    def _loss(self) -> fx.Node:
        """The sum of the slice, by what the mean of the whole sequence divides by."""
        arguments = self._arguments()
        total = self._call(self._node.target, {**arguments, "reduction": 2})
        refs, shapes = self._builder.needs.refs[self._op.name], self._builder.needs.shapes
        if "ignore_index" not in [a.name for a in self._node.target._schema.arguments]:  # type: ignore[union-attr]
            return self._graph.call_function(_aten.div.Tensor, (total, float(math.prod(shapes[refs[0]]))))
        target = self._node.args[1]
        assert isinstance(target, fx.Node)
        weight = arguments.get("weight")
        count = self._graph.call_function(
            counted, (self._builder.env.own[target], arguments.get("ignore_index", -100), weight)
        )
        return self._graph.call_function(_aten.div.Tensor, (total, count))

    def _mean(self) -> fx.Node:
        arguments, shapes = self._arguments(), self._builder.needs.shapes
        read, written = self._builder.needs.refs[self._op.name][0], self._op.writes[0]
        over = math.prod(shapes[read]) / max(1, math.prod(shapes[written]))
        if "dim" in arguments:
            total = self._call(_aten.sum.dim_IntList, arguments)
        else:
            total = self._call(_aten.sum.default, arguments)
        return self._graph.call_function(_aten.div.Tensor, (total, over))

    def _made(self) -> fx.Node:
        example = self._node.meta["val"]
        kind = op_name(self._op.target).removeprefix("new_").removesuffix("_like")
        value = {"zeros": 0, "ones": 1, "empty": 0}.get(kind, dict(self._op.attrs).get("fill_value", 0))
        return self._graph.call_function(
            torch.full, (tuple(example.shape), value), {"dtype": example.dtype, "device": self._builder.device}
        )

    def _once(self) -> fx.Node:
        """What is whole counts in the first slice alone."""
        if self._part.start == 0:
            return self._plain()
        reads = iter(self._recipe.reads)

        def read(arg: fx.Node) -> fx.Node:
            want = next(reads)
            found = self._read(arg, want, prefix=False)
            return found if want.partial else self._graph.call_function(_aten.mul.Tensor, (found, 0))

        return self._graph.node_copy(self._node, read)

    def _diagonal(self) -> fx.Node:
        arguments = self._arguments()
        return self._call(self._node.target, {**arguments, "diagonal": arguments.get("diagonal", 0) + self._part.start})

    def _axis(self) -> int:
        """Of the tokens in the first operand that holds some."""
        layout = next(read.queries for read in self._recipe.reads if read.queries is not None)
        return layout.axis

    def _missing(self) -> int:
        """Tokens that are wanted in front of the slice, where no slice has any."""
        return max(0, self._recipe.amount - self._part.start)

    def _carry(self) -> fx.Node:
        own, before = self._plain(), self._builder.last_before(self._op.writes[0])
        return own if before is None else self._graph.call_function(_aten.add.Tensor, (own, before))

    def _padded(self) -> fx.Node:
        """Other axes are padded as captured."""
        arguments, ndim = self._arguments(), len(self._node.meta["val"].shape)
        amounts = list(arguments["pad"])
        place = 2 * (ndim - 1 - self._axis())
        amounts[place : place + 2] = [self._missing(), 0]
        if not any(amounts):
            found: fx.Node = arguments["self"]
            return found
        return self._call(self._node.target, {**arguments, "pad": amounts})

    def _shift(self) -> fx.Node:
        size, axis = self._part.end - self._part.start, self._axis()
        if op_name(self._op.target) != "cat":
            return self._graph.call_function(_aten.slice.Tensor, (self._padded(), axis, 0, size))
        front, rest = self._arguments()["tensors"]
        missing, pieces = min(size, self._missing()), []
        if missing:
            low = self._part.start
            pieces.append(self._graph.call_function(_aten.slice.Tensor, (front, axis, low, low + missing)))
        if missing < size:
            pieces.append(self._graph.call_function(_aten.slice.Tensor, (rest, axis, 0, size - missing)))
        return self._graph.call_function(_aten.cat.default, (pieces, axis))

    def _convolution(self) -> fx.Node:
        arguments = self._arguments()
        first = next(iter(arguments))
        if self._missing():
            padded = (arguments[first], [self._missing(), 0])
            arguments[first] = self._graph.call_function(_aten.constant_pad_nd.default, padded)
        return self._call(self._node.target, {**arguments, "padding": [0]})

    def _window(self) -> fx.Node:
        first, amount = next(iter(self._arguments().values())), self._recipe.amount
        end = amount + self._shape()[self._axis()]
        return self._graph.call_function(_aten.slice.Tensor, (first, self._axis(), amount, end))

    def _invert(self) -> fx.Node:
        """The first operand is only written to, the last one counts."""
        (places,) = self._arguments()["indices"]
        return self._graph.call_function(_aten.argsort.default, (places,))

    def _drawn(self) -> fx.Node:
        """A call of `rng.keyed`, of which each tensor is placed among the whole sequence."""
        reads, places = iter(self._recipe.reads), []
        form = self._builder.needs.recipe.form(self._op.writes[0])

        def read(arg: fx.Node) -> fx.Node:
            want = next(reads)
            places.append(self._places(want))
            return self._read(arg, want, prefix=False)

        op, number, *args = self._node.args
        taken: Any = fx.node.map_arg((tuple(args), dict(self._node.kwargs)), read)
        own = self._builder.needs.drawn.get(self._node)
        rows: Rows | None = None if own is None else (own.given, own.made, own.size_at)
        given = (op, number, rows, tuple(places), self._places(form), *taken[0])
        return self._graph.call_function(drawn, given, taken[1])

    def _places(self, form: Form) -> Places:
        found = []
        for prefix, layout in form.roles():
            low, high = layout.bounds(self._part, prefix=prefix)
            found.append((layout.axis, layout.stride, layout.block, self._part.tokens - layout.short, low, high))
        return tuple(sorted(found, reverse=True))
