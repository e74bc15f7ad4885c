"""The code of a stage as one rank of a shard group runs it: local sizes, and an exchange wherever an op reads a value
in another state than it is held in (`passes.shards`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopart.ir.errors import PlanError, RefusedError
from autopart.ir.graph import Graph
from autopart.ir.shares import RowLayout
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.calls import EXPANDS, Call, bounds_of, calls_of
from autopart.passes.shards.states import COPY, CUT_KIND, KEEP, WHOLE, State, transition
from autopart.passes.shards.strategies import CLASSES, DRAWN, MEAN, ROWS, SECTION, SIZES, VOCABULARY, Strategy
from autopart.passes.tokens.recipe import INVERT, LOSS, MADE, SHIFT, Recipe
from autopart.passes.tokens.recipe import MEAN as MEAN_OF_ALL
from autopart.planning.derive.sliced_shards import kept_state
from autopart.rng import in_order, keyed_rows, memory_order
from autopart.runtime.stages.recomputation import RecomputedGroup
from autopart.runtime.stages.shard_group import ClassEntropy, Drawn, Exchange, Members, RowEntropy, Vocabulary
from autopart.runtime.stages.slice_functions import drawn
from autopart.runtime.stages.stage_module import StageModule, StateBuffer
from autopart.stagecode.beside import states_beside

_aten = torch.ops.aten


def shard_code(
    code: StageModule, graph: Graph, assignment: Assignment, members: Members, recipe: Recipe | None = None
) -> StageModule:
    """Return the code of a stage that computes this member's parts; its graph is rewritten in place.

    graph: the captured one that it was cut from.  recipe: of its slices, None for whole sequences.  Before: parameters
    that are cut come as pieces, and values of other stages as they hold them (`boundary`).  After: every op reads every
    value in the state that its strategy wants (`_check`), outputs of the graph and new values of buffers are whole, and
    what slices keep for later ones has all of its tokens (`kept_state`).  O(nodes).
    """
    shards, count = _Shards(graph, assignment, members), members.count
    given = [shards.of_parameter(name, code) for name in code.params]
    given += [(shards.boundary(name), name in shards.grads) for name in code.inputs]
    given += [(WHOLE, False)] * len(code.numbers)
    results = [shards.boundary(name) for name in code.outputs] + [WHOLE] * len(code.updates)
    buffers = []
    if recipe is not None:
        names = (*code.states, *(name for name, _ in code.past), *(place.state for place in code.buffers))
        kept = {name: kept_state(assignment, recipe, name) for name in names}
        given += [(kept[name], name in shards.grads) for name, _ in code.past]
        for place in code.buffers:
            given += [(kept[place.state], place.state in shards.grads)] * (1 + (place.start > place.low))
            buffers.append(replace(place, shape=kept[place.state].local(place.shape, count)))
        results += [kept[name] for name in (*code.states, *(place.state for place in code.buffers))]
    shards.rewrite(code.module, given, results)
    return replace(code, buffers=tuple(buffers))


def boundary(graph: Graph, assignment: Assignment, name: str) -> State:
    """Return the state in which a value passes between stages, and is returned."""
    whole = name in graph.outputs or any(name == value for _, value in graph.updates)
    return WHOLE if whole else assignment.states[name]


def held_shape(graph: Graph, assignment: Assignment | None, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a value as ranks pass it on.  shape: of the whole of it, or of a slice."""
    return shape if assignment is None else boundary(graph, assignment, name).local(shape, assignment.shards)


def held_layouts(
    graph: Graph, assignment: Assignment | None, layouts: Mapping[Any, RowLayout | None]
) -> dict[_Value, RowLayout]:
    """Return how values that ranks pass on hold rows: a cut before the rows of an axis leaves less before each."""
    found: dict[_Value, RowLayout] = {}
    for value, layout in layouts.items():
        if layout is None:
            continue
        name = value if isinstance(value, str) else value[0]
        state = boundary(graph, assignment, name) if assignment is not None else WHOLE
        inside = state.kind == CUT_KIND and state.axis == layout.axis and state.before < layout.stride
        shards = assignment.shards if assignment is not None and inside else 1
        found[value] = RowLayout(layout.axis, layout.stride // shards)
    return found


_Value = str | tuple[str, int]
"""A value, or one slice of it."""


_Node = tuple[State, bool]
"""The state of a node, and whether its value may have a gradient."""


class _Shards:
    def __init__(self, graph: Graph, assignment: Assignment, members: Members) -> None:
        self._graph, self._assignment, self._members = graph, assignment, members
        self._calls: Mapping[str, Call] = {call.op.name: call for call in calls_of(graph)}
        self.grads = {v.name for v in graph.values if v.grad} | {p.name for p in graph.params if p.trainable}
        self._held: dict[fx.Node, Any] = {}  # `_Node`; of a recomputed group, one for each result
        self._read: dict[tuple[fx.Node, State], fx.Node] = {}
        self._module: fx.GraphModule

    def boundary(self, name: str) -> State:
        """Return the state in which a value comes from another stage."""
        return boundary(self._graph, self._assignment, name)

    def of_parameter(self, name: str, code: StageModule) -> _Node:
        """Return the state of what a stage's code is given under this name."""
        if name in code.casts:
            name = code.casts[name][0]  # cast as it is held, whatever the strategy of the cast reads
        return self._assignment.states.get(name, COPY), name in self.grads

    def rewrite(self, module: fx.GraphModule, given: Sequence[_Node], wanted: Sequence[State] = ()) -> list[_Node]:
        """Rewrite one graph, and return the states of its results.  given: of its placeholders.  wanted: of its
        results, as far as there are so many; () for a recomputed group, whose readers take them as they are."""
        outer, self._module = getattr(self, "_module", module), module
        states = iter(given)
        for node in list(module.graph.nodes):
            if node.op == "placeholder":
                self._held[node] = next(states)
            elif node.op == "call_module":
                self._group(module, node)
            elif node.op == "call_function":
                self._function(node)
        end = module.graph.output_node()
        every: Any = end.args[0]
        results = [self._as(end, result, state) for result, state in zip(every, wanted, strict=False)]
        results += every[len(results) :]
        end.args = (tuple(results),)
        _check(module, self._assignment, self._held)
        module.recompile()
        self._module = outer
        return [self._held[result] for result in results]

    def _group(self, module: fx.GraphModule, node: fx.Node) -> None:
        group = module.get_submodule(str(node.target))
        assert isinstance(group, RecomputedGroup)
        arguments: Any = node.args
        self._held[node] = self.rewrite(group.body, [self._held[arg] for arg in arguments])

    def _function(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            of_group = isinstance(self._held[source], list)
            name = _name(node)
            own = self._assignment.states.get(name), name in self.grads
            self._held[node] = self._held[source][node.args[1]] if of_group else own
            return
        strategy = self._assignment.strategies.get(_name(node))
        if strategy is None:
            self._beside(node)
            return
        if _how(node) == MADE:
            sizes, *rest = node.args
            node.args = (strategy.writes[0].local(sizes, self._members.count), *rest)  # type: ignore[arg-type]
        wanted = iter(strategy.reads)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: self._as(node, arg, next(wanted)))
        node.args, node.kwargs = args, kwargs
        self._held[node] = strategy.writes[0], _name(node) in self.grads
        part = partial(_part, strategy.writes[0], self._members.count)  # results of calls in another form are cut alike
        node.meta["own"] = pytree.tree_map_only(torch.Tensor, part, _captured(node))
        self._change(node, strategy)

    def _beside(self, node: fx.Node) -> None:
        """Write a call beside the ops, in the states that a closed list says.  Raises RefusedError for any other."""
        read = node.all_input_nodes
        wanted = states_beside(node, self._held[read[0]][0]) if read and not _name(node) else None
        if wanted is None:
            raise _refused(node, self._calls, self._members.count)
        for arg, state in zip(read, (wanted[0], *[wanted[1]] * (len(read) - 1)), strict=True):
            node.replace_input_with(arg, self._as(node, arg, state))
        found = wanted[0], any([self._held[arg][1] for arg in read])
        appends = getattr(node.target, "__func__", None) is StateBuffer.append
        self._held[node] = [found, found] if appends else found

    def _as(self, reader: fx.Node, value: fx.Node, wanted: State) -> fx.Node:
        """Return a value in the state that a reader wants; once for all readers that want it."""
        held, grad = self._held[value]
        change = transition(held, wanted)
        if held == wanted or (change.forward == KEEP and not grad):
            return value
        if (value, wanted) not in self._read:
            made = Exchange(self._members, *_moves(held, wanted))
            found = self._call(reader, f"exchange_{len(self._read)}", made, value)
            self._read[value, wanted] = found
            self._held[found] = wanted, grad
        return self._read[value, wanted]

    def _call(self, before: fx.Node, name: str, module: nn.Module, *args: Any) -> fx.Node:
        self._module.add_submodule(name, module)
        with self._module.graph.inserting_before(before):
            return self._module.graph.call_module(name, args)

    # -- ops that are called otherwise -------------------------------------------------------------------------------

    def _change(self, node: fx.Node, strategy: Strategy) -> None:
        changes: dict[str, Callable[[fx.Node], None]] = {
            SIZES: self._sizes, SECTION: self._section, MEAN: self._mean,
            VOCABULARY: self._vocabulary, CLASSES: self._classes, ROWS: self._rows,
        }  # fmt: skip
        if strategy.how == DRAWN:
            self._drawn(node, strategy.reads[0])
        elif strategy.how and any(state.kind == CUT_KIND for state in (*strategy.reads, *strategy.writes)):
            changes[strategy.how](node)

    def _sizes(self, node: fx.Node) -> None:
        expands = self._calls[_name(node)].name in EXPANDS
        node.target = _aten.expand.default if expands else _aten.reshape.default
        whole = node.meta.get("slice_shape", self._calls[_name(node)].shape(_name(node)))
        node.args, node.kwargs = (node.args[0], list(self._assignment.local_shape(_name(node), whole))), {}

    def _section(self, node: fx.Node) -> None:
        call, count = self._calls[_name(node)], self._members.count
        found, dim = bounds_of(call), call.dim()
        assert found
        first, end = found[0]
        if node.target is _aten.alias.default:  # of all tokens of a slice
            return
        if call.name in ("slice", "narrow"):
            node.target, node.args = _aten.slice.Tensor, (node.args[0], dim, first // count, end // count)
        else:
            node.target, node.args = _aten.split.Tensor, (node.args[0], (end - first) // count, dim)
        node.kwargs = {}

    def _mean(self, node: fx.Node) -> None:
        if _how(node) == MEAN_OF_ALL:  # a sum that is divided by the number of all entries
            return
        with self._module.graph.inserting_after(node):
            share = self._module.graph.call_function(_aten.div.Tensor, (node, self._members.count))
        self._replace(node, share, keep=share)

    def _replace(self, node: fx.Node, found: fx.Node, keep: fx.Node | None = None) -> None:
        node.replace_all_uses_with(found, delete_user_cb=lambda user: user is not keep)
        self._held[found] = self._held[node]

    def _vocabulary(self, node: fx.Node) -> None:
        call = self._calls[_name(node)]
        padding: Any = call.arguments.get("padding_idx", -1)
        made = Vocabulary(self._members, call.shape(call.reads[0])[0], -1 if padding is None else padding)
        self._become(node, made)

    def _classes(self, node: fx.Node) -> None:
        ignore, mean, _ = self._entropy(node)
        self._become(node, ClassEntropy(self._members, ignore, mean=mean))

    def _rows(self, node: fx.Node) -> None:
        ignore, mean, smoothing = self._entropy(node)
        if mean:
            self._become(node, RowEntropy(self._members, ignore, smoothing))

    def _entropy(self, node: fx.Node) -> tuple[int, bool, float]:
        found: Any = self._calls[_name(node)].arguments
        mean = found.get("reduction", 1) == 1 and _how(node) != LOSS  # a slice sums, and is divided by all that count
        return found.get("ignore_index", -100), mean, found.get("label_smoothing", 0.0)

    def _drawn(self, node: fx.Node, state: State) -> None:
        """Draw for the whole tensor, in the order of its axes in memory when it was captured."""
        (source,) = node.all_input_nodes
        captured = node.meta.get("slice_of", _captured(source))
        ndim = len(self._calls[_name(node)].shape(self._calls[_name(node)].reads[0]))
        laid: Any = source.args[0] if source.op == "call_module" and source.args else source
        order = memory_order(captured) if isinstance(captured, torch.Tensor) else range(ndim)
        order = laid.args[1] if laid.target is in_order else order
        cut = (state.axis, state.before) if state.kind == CUT_KIND else None
        arguments: Any = node.args
        places, rows = (), None
        if node.target is drawn:
            op, draw, rows, (places,), _, *rest = arguments
            arguments = (op, draw, *rest)
        elif node.target is keyed_rows:
            op, draw, given, made, size_at, *rest = arguments
            arguments, rows = (op, draw, *rest), (given, made, size_at)
        made = Drawn(self._members, cut, order, places, rows)
        if not places:  # slices of tokens are not compiled
            node.meta["own"] = pytree.tree_map_only(torch.Tensor, made.like, node.meta["own"])
        self._become(node, made, arguments)

    def _become(self, node: fx.Node, module: nn.Module, arguments: Sequence[Any] | None = None) -> None:
        """Replace an op by a module that takes these arguments, by default its first two."""
        found = self._call(node, f"shard_{node.name}", module, *(arguments or node.args[:2]))
        self._replace(node, found)
        found.meta |= {"op": _name(node), "own": node.meta["own"]}
        self._module.graph.erase_node(node)


def _name(node: fx.Node) -> str:
    """Return the name that a node has in the captured graph, "" for one that it lacks."""
    return str(node.meta.get("op", ""))


def _refused(node: fx.Node, calls: Mapping[str, Call], count: int) -> RefusedError:
    """Return the refusal of a call without a rule, at the op that it is written for: the next one that reads it, or
    else the last one that it reads."""
    ops = [calls[_name(each)].op for each in _around(node) if _name(each) in calls]
    called = getattr(node.target, "__qualname__", str(node.target))
    return RefusedError(
        f"{called} cannot be divided among {count} ranks",
        where=f"module {ops[0].module} at {ops[0].where}" if ops else "",
        why=f"no rule says what it computes of parts{f', beside op {ops[0].name}' if ops else ''}",
        fix="use tensor_parallel=1",
    )


def _around(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, those that read it, directly or not, and those that it reads; the nearest first."""
    for beside in (operator.attrgetter("users"), operator.attrgetter("all_input_nodes")):
        found = [node]
        for each in found:
            yield each
            found += [other for other in beside(each) if other not in found]


def _how(node: fx.Node) -> str:
    """Return how the code of a slice runs an op, "" in the code of whole sequences."""
    return str(node.meta.get("how", ""))


def _part(state: State, count: int, whole: torch.Tensor) -> torch.Tensor:
    """Return the form of a member's part of a result, for what compiles the code."""
    return torch.empty(state.local(whole.shape, count), dtype=whole.dtype, device="meta")


def _captured(node: fx.Node) -> Any:
    """Return what was captured of a value, also behind an exchange."""
    source: Any = node.args[0] if node.op == "call_module" and node.name.startswith("exchange") else node
    return source.meta.get("val")


def _moves(held: State, wanted: State) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield the moves of the forward and of the backward between two states, each with the cuts it is about."""
    change = transition(held, wanted)
    old = (held.axis, held.before) if held.kind == CUT_KIND else (wanted.axis, wanted.before)
    new = (wanted.axis, wanted.before) if wanted.kind == CUT_KIND else old
    yield change.forward, old, new
    yield change.backward, new if change.backward == "recut" else old, old


def _check(module: fx.GraphModule, assignment: Assignment, held: Mapping[fx.Node, Any]) -> None:
    """Walk every edge of rewritten code: what an op reads is in the state that its strategy wants, or equal to it on
    every rank without a gradient.  Raises PlanError."""
    for node in module.graph.nodes:
        strategy = assignment.strategies.get(_name(node))
        if strategy is None or node.op not in ("call_function", "call_module"):
            continue
        read: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), read.append)
        # no tensor for its shape, or to write into, or joined with others in other slices alone
        fewer = strategy.how == SIZES or _how(node) in (MADE, INVERT, SHIFT)
        for arg, wanted in zip(read, strategy.reads, strict=not fewer):
            state, grad = held[arg]
            if state != wanted and (grad or transition(state, wanted).forward != KEEP):
                raise PlanError(f"op {node.name} reads {arg.name} as {state}, and needs it {wanted}")
