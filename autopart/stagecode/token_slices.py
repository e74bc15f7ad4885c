"""Captured + recipe + lengths -> the code of a stage for each slice of tokens.

The flat graph is cut once for every slice: sizes are those of the slice, values at full length are cut to the tokens
that an op needs, and a value that is needed with the tokens before it is joined from the parts of earlier slices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopart.capture import Captured
from autopart.capture.trace.to_graph import results_of
from autopart.ir.errors import UsageError
from autopart.ir.graph import Adjusted, Op
from autopart.ir.plan import Stage
from autopart.passes.ops.table import op_name
from autopart.passes.tokens.recipe import Form, Recipe
from autopart.planning.derive.reduction import Layouts
from autopart.runtime.stages.slice_functions import Places, causal_attention, counted, drawn, part_of
from autopart.runtime.stages.stage_module import StageModule, StageSlices
from autopart.stagecode.memory import laid_for
from autopart.stagecode.rewrites import accumulate_in_place, draws_of
from autopart.stagecode.slice_graph import SliceGraph, SliceNeeds
from autopart.stagecode.split import ancestors, casts_of, cut
from autopart.stagecode.stage_graph import draw_for_all, stage_graph

_aten = torch.ops.aten


def slice_stage(
    captured: Captured,
    recipe: Recipe,
    planned: Stage,
    outputs: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    adjusted: Sequence[Adjusted] = (),
    layouts: Layouts = MappingProxyType({}),
    *,
    deferrable: bool = False,
    shard: Callable[[StageModule], StageModule] | None = None,
) -> StageSlices:
    """Return the code of a stage for slices of these lengths.

    Each stage runs what it needs of the prologue itself.  outputs: values that leave the stage, or the loss.  adjusted,
    layouts, deferrable, shard: as in `split.stage_module`.  What is recomputed runs again in the backward of each
    slice, but states are kept.  Raises UsageError for lengths that do not make up the sequence, RefusedError as
    `draws_of`.  O(slices * nodes).
    """
    if sum(lengths) != recipe.tokens or min(lengths, default=0) < 1:
        raise UsageError(
            f"slices of {', '.join(map(str, lengths))} tokens do not make up a sequence of {recipe.tokens}",
            fix="pass lengths of at least one token whose sum is the length of the sequences",
        )
    leaving = [name for name in outputs if name in recipe.forms]
    casts = casts_of(captured.graph, set(planned.ops), outputs)
    drawn = draws_of(captured, set(planned.ops), layouts) if planned.division.splits else {}
    needs = SliceNeeds(captured, recipe, planned, leaving, adjusted, casts, drawn)
    parts = recipe.slices(lengths)
    codes = [_slice_module(SliceGraph(needs, parts, number, device), len(parts)) for number in range(len(parts))]
    codes = codes if shard is None else [shard(code) for code in codes]
    slices = tuple([accumulate_in_place(code, captured.tensors, deferrable=deferrable) for code in codes])
    before = ancestors(captured.graph, needs.prologue, among=recipe.prologue)
    prologue = cut(captured, before, needs.prologue, device, adjusted=adjusted) if needs.prologue else None
    return prologue, slices


def _slice_module(code: SliceGraph, count: int) -> StageModule:
    """Write the ops of one of `count` slices, and return its code."""
    needs, captured = code.needs, code.needs.captured
    made: dict[str, list[str]] = {}
    for node in captured.module.graph.nodes:
        if node.op == "call_function" and node not in code.own:
            last = next(reversed(code.graph.nodes), None)  # none before an op that reads nothing
            _write(code, node)
            since = (one.name for one in _since(code.graph, last) if one.target not in (part_of, operator.getitem))
            made[node.name] = list(since)
    states, joint = ((), ()) if code.number == count - 1 else (tuple(needs.states), tuple(needs.shared))
    results = [code.own[code.nodes[name]] for name in (*needs.outputs, *states)]
    results += [code.added[name] for name in joint]
    names = tuple(code.params.values())
    kinds = captured.names.kinds
    return StageModule(
        _module(code, made, results),
        names,
        tuple(code.name(node) for node in code.inputs),
        needs.outputs,
        (),
        {name: captured.tensors[name].to(code.device) for name in names if kinds.get(name) == "constant"},
        needs.numbers,
        {name: needs.casts[node.name] for node, name in code.params.items() if node.name in needs.casts},
        states,
        code.past,
        tuple(code.places.values()),
    )


def _since(graph: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    """Return the nodes behind `last`, from the newest on; all of them for None."""
    return takewhile(lambda one: one is not last, reversed(graph.nodes))


def _module(code: SliceGraph, made: Mapping[str, Sequence[str]], results: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph as a module.  made: the nodes of each op; a recomputed group also joins its states again, since
    only their parts are kept."""
    groups = [[name for op in group for name in made.get(op, ())] for group in code.needs.groups]
    if not any(groups):
        code.graph.output(tuple(results))
        return fx.GraphModule(nn.Module(), code.graph)
    given = code.graph.find_nodes(op="placeholder")
    calls = [node for node in code.graph.nodes if node.op == "call_function"]
    for node in calls:  # what is written beside the ops has no name of theirs
        node.meta.setdefault("op", "")
    return stage_graph(calls, given, results, code.device, [group for group in groups if group])


def _write(code: SliceGraph, node: fx.Node) -> None:
    """Write a captured node, on the tokens of the slice and on those before them, as far as they are needed."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        for env in (code.own, code.prefix):
            if source in env and not isinstance(source.meta.get("val"), torch.Tensor):
                env[node] = code.graph.call_function(operator.getitem, (env[source], node.args[1]))
                env[node].meta["op"] = node.name
        if node in code.own:
            code.join(code.name(node))
        return
    op, needs = code.needs.by_name.get(node.name), code.needs
    if op is None:
        return
    if not needs.own.isdisjoint(op.writes):
        code.own[node] = _Writer(code, node, op).node()
        if node in results_of(node):
            code.join(code.name(node))
    if any(name in needs.prefix and name not in needs.joined for name in op.writes):
        code.prefix[node] = _Writer(code, node, op, prefix=True).node()


class _Writer:
    """Writes one op into the graph of a slice (`passes.tokens.recipe.OpRecipe`).

    prefix: on the tokens before the slice too.
    """

    def __init__(self, code: SliceGraph, node: fx.Node, op: Op, *, prefix: bool = False) -> None:
        self._code, self._node, self._op, self._prefix = code, node, op, prefix
        self._needs, self._part, self._call_function = code.needs, code.part, code.graph.call_function
        self._recipe = code.needs.recipe.ops[op.name]

    def node(self) -> fx.Node:
        """Write the op, and return its result: each way to run in slices (`passes.tokens.recipe`) is a method."""
        found: fx.Node = getattr(self, f"_{self._recipe.how or 'plain'}")()
        return found

    def _read(self, arg: fx.Node, want: Form) -> fx.Node:
        """Return what the op reads of a value, adjusted by the number of the micro-batch if there is one."""
        found = self._code.read(arg, want, prefix=self._prefix)
        if (self._node, arg) not in self._needs.reads:
            return found
        place, adjust = self._needs.reads[self._node, arg]
        return self._call_function(adjust, (found, self._code.numbers[place]))

    def _reader(self) -> Callable[[fx.Node], fx.Node]:
        """Return a function that reads the operands of the op, called in their order."""
        reads = iter(self._recipe.reads)
        return lambda arg: self._read(arg, next(reads))

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments by name, with nodes of the slice in place of the captured ones."""
        args, kwargs = fx.node.map_arg((tuple(self._node.args), dict(self._node.kwargs)), self._reader())
        target: Any = self._node.target
        names = [argument.name for argument in target._schema.arguments]
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: self._code.device if isinstance(arg, torch.device) else arg for name, arg in found.items()}

    def _as_op(self, made: fx.Node) -> fx.Node:
        """Note of which op a node is the code, and what it makes; beside it may stand others that cut, join or add."""
        made.meta |= {"op": self._op.name, "how": self._recipe.how}
        made.meta["slice_shape"] = self._shape() if self._op.writes else ()
        made.meta["slice_of"] = next((arg.meta.get("val") for arg in self._node.all_input_nodes), None)
        return made

    def _function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return self._as_op(self._call_function(target, args, kwargs))

    def _call(self, target: Any, arguments: dict[str, Any]) -> fx.Node:
        """Call an op with its leading arguments by place, as they are captured, and the rest by name."""
        args: list[Any] = []
        for argument in target._schema.arguments:
            if argument.kwarg_only or argument.name not in arguments:
                break
            args.append(arguments[argument.name])
        taken = {argument.name for argument in target._schema.arguments[: len(args)]}
        rest = {name: value for name, value in arguments.items() if name not in taken}
        return self._function(target, tuple(args), rest)

    def _plain(self) -> fx.Node:
        if isinstance(self._node.target, torch._ops.OpOverload):
            return self._call(self._node.target, self._arguments())
        # A random op of whole operands: every slice draws the same.
        copy = self._code.graph.node_copy(self._node, self._reader())
        if self._node in self._needs.drawn:
            draw_for_all(copy, self._needs.drawn[self._node])
        return self._as_op(copy)

    def _shape(self) -> tuple[int, ...]:
        """Return the shape of the result in the slice."""
        written = self._op.writes[0]
        form: Form = self._needs.recipe.form(written)
        if self._prefix:
            form = form.as_prefix(self._needs.recipe.reach.get(written))
        return form.shape(self._needs.shapes[written], self._part)

    def _sizes(self) -> fx.Node:
        arguments, shape, name = self._arguments(), self._shape(), op_name(self._op.target)
        first = next(iter(arguments.values()))
        if name in ("unsqueeze", "squeeze", "split", "chunk", "split_with_sizes"):
            return self._call(self._node.target, arguments)
        if name in ("expand", "broadcast_to"):
            return self._function(_aten.expand.default, (first, list(shape)))
        if name in ("slice", "narrow"):
            axis = self._recipe.reads[0].queries or self._recipe.reads[0].keys
            assert axis is not None
            if not self._recipe.amount:
                return self._function(_aten.alias.default, (first,))
            return self._function(_aten.slice.Tensor, (first, axis.axis, 0, shape[axis.axis]))
        return self._function(_aten.reshape.default, (first, list(shape)))

    def _causal(self) -> fx.Node:
        arguments = self._arguments()
        return self._function(causal_attention, (), {**arguments, "start": self._part.start})

    def _loss(self) -> fx.Node:
        """Return the sum of the slice, divided by the divisor of the mean over the whole sequence."""
        arguments = self._arguments()
        total = self._call(self._node.target, {**arguments, "reduction": 2})
        refs, shapes = self._needs.refs[self._op.name], self._needs.shapes
        if "ignore_index" not in [a.name for a in self._node.target._schema.arguments]:  # type: ignore[union-attr]
            return self._call_function(_aten.div.Tensor, (total, float(math.prod(shapes[refs[0]]))))
        target = self._node.args[1]
        assert isinstance(target, fx.Node)
        weight = arguments.get("weight")
        count = self._call_function(counted, (self._code.own[target], arguments.get("ignore_index", -100), weight))
        return self._call_function(_aten.div.Tensor, (total, count))

    def _mean(self) -> fx.Node:
        arguments, shapes = self._arguments(), self._needs.shapes
        read, written = self._needs.refs[self._op.name][0], self._op.writes[0]
        over = math.prod(shapes[read]) / max(1, math.prod(shapes[written]))
        if "dim" in arguments:
            total = self._call(_aten.sum.dim_IntList, arguments)
        else:
            total = self._call(_aten.sum.default, arguments)
        return self._call_function(_aten.div.Tensor, (total, over))

    def _made(self) -> fx.Node:
        example = self._node.meta["val"]
        kind = op_name(self._op.target).removeprefix("new_").removesuffix("_like")
        value = {"zeros": 0, "ones": 1, "empty": 0}.get(kind, dict(self._op.attrs).get("fill_value", 0))
        return self._function(
            torch.full, (tuple(example.shape), value), {"dtype": example.dtype, "device": self._code.device}
        )

    def _once(self) -> fx.Node:
        """Add operands that hold all tokens in the first slice alone."""
        if self._part.start == 0:
            return self._plain()
        reads = iter(self._recipe.reads)

        def read(arg: fx.Node) -> fx.Node:
            want = next(reads)
            found = self._read(arg, want)
            return found if want.partial else self._call_function(_aten.mul.Tensor, (found, 0))

        return self._as_op(self._code.graph.node_copy(self._node, read))

    def _diagonal(self) -> fx.Node:
        arguments = self._arguments()
        return self._call(self._node.target, {**arguments, "diagonal": arguments.get("diagonal", 0) + self._part.start})

    def _axis(self) -> int:
        """Return the axis of the tokens in the first operand that has one."""
        layout = next(read.queries for read in self._recipe.reads if read.queries is not None)
        return layout.axis

    def _missing(self) -> int:
        """Return how many tokens the op needs before the first token of the sequence."""
        return max(0, self._recipe.amount - self._part.start)

    def _carry(self) -> fx.Node:
        own, before = self._plain(), self._code.last_before(self._op.writes[0])
        return own if before is None else self._call_function(_aten.add.Tensor, (own, before))

    def _padded(self) -> fx.Node:
        """Pad the tokens in the first slices alone, and other axes as captured."""
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
            return self._call_function(_aten.slice.Tensor, (self._padded(), axis, 0, size))
        front, rest = self._arguments()["tensors"]
        missing, pieces = min(size, self._missing()), []
        if missing:
            low = self._part.start
            pieces.append(self._call_function(_aten.slice.Tensor, (front, axis, low, low + missing)))
        if missing < size:
            pieces.append(self._call_function(_aten.slice.Tensor, (rest, axis, 0, size - missing)))
        return self._function(_aten.cat.default, (pieces, axis))

    def _conv(self) -> fx.Node:
        arguments = self._arguments()
        first = next(iter(arguments))
        if self._missing():
            padded = (arguments[first], [self._missing(), 0])
            arguments[first] = self._call_function(_aten.constant_pad_nd.default, padded)
        return self._call(self._node.target, {**arguments, "padding": [0]})

    def _window(self) -> fx.Node:
        first, amount = next(iter(self._arguments().values())), self._recipe.amount
        end = amount + self._shape()[self._axis()]
        return self._function(_aten.slice.Tensor, (first, self._axis(), amount, end))

    def _invert(self) -> fx.Node:
        """Invert a permutation that was written with index_put."""
        (places,) = self._arguments()["indices"]
        return self._function(_aten.argsort.default, (places,))

    def _drawn(self) -> fx.Node:
        """Draw as `rng.keyed` does, with the place of each tensor in the whole sequence."""
        reads, places = iter(self._recipe.reads), []
        form = self._needs.recipe.form(self._op.writes[0])

        def read(arg: fx.Node) -> fx.Node:
            want = next(reads)
            places.append(self._places(want))
            return laid_for(self._node, arg, self._read(arg, want))

        op, number, *args = self._node.args
        taken: Any = fx.node.map_arg((tuple(args), dict(self._node.kwargs)), read)
        given = (op, number, self._needs.drawn.get(self._node), tuple(places), self._places(form), *taken[0])
        return self._function(drawn, given, taken[1])

    def _places(self, form: Form) -> Places:
        found = []
        for prefix, layout in form.roles():
            low, high = layout.bounds(self._part, prefix=prefix)
            found.append((layout.axis, layout.stride, layout.block, self._part.tokens - layout.short, low, high))
        return tuple(sorted(found, reverse=True))
