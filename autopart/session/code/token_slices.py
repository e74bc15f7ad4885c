"""Captured + recipe + lengths -> the code of a stage for each slice of tokens.

The flat graph is cut as `split` cuts it, once for every slice: sizes are those of the slice, values of the prologue and
whole values are cut to the tokens that an op needs, and a value that is needed with the tokens before it is joined from
the blocks that earlier slices made.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import fx, nn

from autopart.capture import Captured
from autopart.capture.trace.to_graph import results_of
from autopart.ir.errors import UsageError
from autopart.passes.tokens.recipe import Recipe, Slice, TokenLayout
from autopart.runtime.stages.slice_functions import joined, last_of, part_of
from autopart.runtime.stages.stage_module import StageModule, StageSlices, StateBuffer
from autopart.session.code.slice_needs import Extras, SliceNeeds
from autopart.session.code.slice_ops import emit, narrowed
from autopart.session.code.split import cut
from autopart.session.code.stage_graph import stage_graph

_aten = torch.ops.aten


def slice_stage(
    captured: Captured,
    recipe: Recipe,
    ops: Collection[str],
    outputs: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    extras: Extras | None = None,
) -> StageSlices:
    """The code of a stage for slices of these lengths.

    ops: of the stage; those of the prologue among them do not count, each stage runs what it needs of it.  outputs:
    values that leave the stage, or the loss.
    Raises UsageError for lengths that do not make up the sequence.  O(slices * nodes).
    """
    if sum(lengths) != recipe.tokens or min(lengths, default=0) < 1:
        raise UsageError(
            f"slices of {', '.join(map(str, lengths))} tokens do not make up a sequence of {recipe.tokens}",
            fix="pass lengths of at least one token whose sum is the length of the sequences",
        )
    extras = extras or Extras()
    needs = SliceNeeds(captured, recipe, ops, [name for name in outputs if name in recipe.forms], extras)
    bounds = pairwise(accumulate(lengths, initial=0))
    parts = [Slice(start, end, recipe.tokens) for start, end in bounds]
    slices = tuple(_Builder(needs, parts, number, device).module() for number in range(len(parts)))
    before = behind(captured, recipe, needs.prologue)
    prologue = cut(captured, before, needs.prologue, device, adjusted=extras.adjusted) if needs.prologue else None
    return prologue, slices


def behind(captured: Captured, recipe: Recipe, values: Iterable[str]) -> list[str]:
    """The ops of the prologue that these values depend on."""
    needed, ops = set(values), []
    for op in reversed(captured.graph.ops):
        if op.name in recipe.prologue and needed.intersection(op.writes):
            ops.append(op.name)
            needed.update(op.reads)
    return ops


@dataclass
class _Env:
    """Nodes of the code that is made, by captured node: own tokens, with those before, and cut ones by how."""

    own: dict[fx.Node, fx.Node]
    prefix: dict[fx.Node, fx.Node]
    cut: dict[tuple[Any, ...], fx.Node]


@dataclass(frozen=True)
class _Shared:
    """A state that slices share: where it lies, and what is given of it."""

    place: StateBuffer
    buffer: fx.Node
    before: fx.Node | None


class _Builder:
    """Makes the code of one slice."""

    def __init__(self, needs: SliceNeeds, parts: Sequence[Slice], number: int, device: torch.device) -> None:
        self.needs, self.part, self.number, self.last = needs, parts[number], number, number == len(parts) - 1
        self._parts = parts
        self.device = device
        self.graph = fx.Graph()
        self.env = _Env({}, {}, {})
        self.numbers: dict[int, fx.Node] = {}
        self._made: dict[str, list[str]] = {}
        self._added: dict[str, fx.Node] = {}
        self._captured = needs.captured
        self._nodes = {self.name(node): node for node in self._captured.module.graph.nodes}

    def name(self, node: fx.Node) -> str:
        """The name of a node's value or parameter."""
        return self._captured.names.params.get(node.name, self._captured.names.value(node))

    def module(self) -> StageModule:
        """The code of the slice."""
        needs, captured = self.needs, self._captured
        given = {**captured.names.params, **{name: f"cast {name}" for name in needs.casts}}
        params = [node for node in captured.module.graph.nodes if node.name in given and self._used(node)]
        inputs = [self._nodes[name] for name in (*needs.received, *needs.full)]
        for node in (*params, *inputs):
            self.env.own[node] = self.graph.placeholder(node.name)
        self.numbers = {place: self.graph.placeholder(f"number_{place}") for place in needs.numbers}
        past = [(state, number) for state in needs.states for number in self._before(state)]
        self._blocks = {key: self.graph.placeholder(f"past_{self._nodes[key[0]].name}_{key[1]}") for key in past}
        shared = {name: self._place(name) for name in needs.shared}
        self._shared = {name: _Shared(place, *self._room(place)) for name, place in shared.items()}
        for name in needs.received:
            self._join(name)
        for node in captured.module.graph.nodes:
            if node.op == "call_function" and node not in self.env.own:
                before = next(reversed(self.graph.nodes))
                self._emit(node)
                made = (one.name for one in self._since(before) if one.target not in (part_of, operator.getitem))
                self._made[node.name] = list(made)
        states, joint = ((), ()) if self.last else (tuple(needs.states), tuple(needs.shared))
        results = [self.env.own[self._nodes[name]] for name in (*needs.outputs, *states)]
        results += [self._added[name] for name in joint]
        names = tuple(given[node.name] for node in params)
        constants = {n: captured.tensors[n].to(self.device) for n in names if captured.names.kinds.get(n) == "constant"}
        return StageModule(
            self._code(results),
            names,
            tuple(self.name(node) for node in inputs),
            needs.outputs,
            (),
            constants,
            needs.numbers,
            {given[node.name]: needs.casts[node.name] for node in params if node.name in needs.casts},
            states,
            tuple(past),
            tuple(shared.values()),
        )

    def _place(self, name: str) -> StateBuffer:
        """Where a state lies in the tensor that slices share, and what this slice reads of it."""
        layout, needs = self._layout(name), self.needs
        held = replace(layout, reach=needs.recipe.reach.get(name))
        low, _ = (layout.block * token for token in held.bounds(self.part, prefix=True))
        start, end = (layout.block * token for token in layout.bounds(self.part, prefix=False))
        dtype = self._nodes[name].meta["val"].dtype
        return StateBuffer(name, needs.shapes[name], dtype, self.device, layout.axis, min(low, start), start, end)

    def _room(self, place: StateBuffer) -> tuple[fx.Node, fx.Node | None]:
        """What is given of it."""
        name = self._nodes[place.state].name
        buffer = self.graph.placeholder(f"all_{name}")
        return buffer, self.graph.placeholder(f"before_{name}") if place.start > place.low else None

    def _since(self, before: fx.Node) -> Iterator[fx.Node]:
        """What was written after a node."""
        return takewhile(lambda one: one is not before, reversed(self.graph.nodes))

    def _code(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """What was written; of ops that are run again with what is joined for them, since only parts are kept."""
        groups = [[name for op in group for name in self._made.get(op, ())] for group in self.needs.groups]
        if not any(groups):
            self.graph.output(tuple(results))
            return fx.GraphModule(nn.Module(), self.graph)
        given = self.graph.find_nodes(op="placeholder")
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        return stage_graph(calls, given, results, self.device, [group for group in groups if group])

    def _used(self, node: fx.Node) -> bool:
        needs = self.needs
        readers = (needs.by_name[user.name] for user in node.users if user.name in needs.by_name)
        return any(not (needs.own | needs.prefix).isdisjoint(op.writes) for op in readers)

    def _emit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            for env in (self.env.own, self.env.prefix):
                if source in env and not isinstance(source.meta.get("val"), torch.Tensor):
                    env[node] = self.graph.call_function(operator.getitem, (env[source], node.args[1]))
            if node in self.env.own:
                self._join(self.name(node))
            return
        op = self.needs.by_name.get(node.name)
        if op is None:
            return
        if not self.needs.own.isdisjoint(op.writes):
            self.env.own[node] = emit(self, node, op)
            for result in results_of(node):
                if result is node:
                    self._join(self.name(node))
        if any(name in self.needs.prefix and name not in self.needs.joined for name in op.writes):
            self.env.prefix[node] = emit(self, node, op, prefix=True)

    def _before(self, state: str) -> list[int]:
        """The slices of which this one reads a state."""
        reach, layout = self.needs.states[state], self._layout(state)
        if reach is None:
            return list(range(self.number))
        start = layout.bounds(self.part, prefix=False)[0]
        ends = [layout.bounds(part, prefix=False)[1] for part in self._parts[: self.number]]
        return [number for number, end in enumerate(ends) if end > start - reach]

    def _layout(self, name: str) -> TokenLayout:
        layout = self.needs.recipe.forms[name].queries
        assert layout is not None
        return layout

    def _join(self, name: str) -> None:
        if name not in self.needs.joined:
            return
        node, layout = self._nodes[name], self._layout(name)
        if name in self._shared:
            shared = self._shared[name]
            given = (shared.buffer, self.env.own[node], shared.before)
            both = self.graph.call_function(shared.place.append, given)
            self._added[name] = self.graph.call_function(operator.getitem, (both, 0))
            self.env.prefix[node] = self.graph.call_function(operator.getitem, (both, 1))
            return
        before = self._before(name)
        every = [self._blocks[name, number] for number in before] + [self.env.own[node]]
        found = self.graph.call_function(joined, (every, layout.axis, layout.stride))
        held = replace(layout, reach=self.needs.recipe.reach.get(name))
        (low, high), first = held.bounds(self.part, prefix=True), self._first(name, before)
        if low > first:  # in the oldest slice that is needed, some tokens are not
            there = high - first
            found = self.graph.call_function(part_of, (found, layout.axis, layout.stride, there, low - first, there))
        self.env.prefix[node] = found

    def _first(self, name: str, before: Sequence[int]) -> int:
        """The first token of the parts of a state."""
        part = self._parts[before[0]] if before else self.part
        return self._layout(name).bounds(part, prefix=False)[0]

    def last_before(self, name: str) -> fx.Node | None:
        """The last token of a state before this slice; None in the first one."""
        layout = self._layout(name)
        sizes = [layout.size(part, prefix=False) for part in self._parts[: self.number]]
        filled = [number for number, size in enumerate(sizes) if size]  # of a value without the last tokens not all are
        if not filled:
            return None
        return self.graph.call_function(last_of, (self._blocks[name, filled[-1]], layout.axis))

    def with_halo(self, node: fx.Node, halo: int) -> fx.Node:
        """The tokens of a slice and as many before them as there are, at most `halo`."""
        name, layout = self.name(node), self._layout(self.name(node))
        blocks = [self._blocks[name, number] for number in self._before(name)]
        if not blocks:
            return self.env.own[node]
        start = layout.bounds(self.part, prefix=False)[0]
        first = layout.bounds(self._parts[self._before(name)[0]], prefix=False)[0]
        every = self.graph.call_function(joined, ([*blocks, self.env.own[node]], layout.axis, 1))
        away = max(0, start - halo) - first
        end = layout.bounds(self.part, prefix=False)[1] - first
        return self.graph.call_function(_aten.slice.Tensor, (every, layout.axis, away, end)) if away else every

    def read(self, arg: fx.Node, want: Any, *, prefix: bool) -> fx.Node:
        """What an op reads of a value.  want: the form that it needs of it; prefix: whether the op itself is run on the
        tokens before too."""
        name = self.name(arg)
        form = self.needs.recipe.forms.get(name)
        if form is not None and not form.whole:
            if want.halo > 0 and not form.halo:
                return self.with_halo(arg, want.halo)
            wide = prefix or (want.keys is not None and form.keys is None)
            return (self.env.prefix if wide and form.keys is None and form.queries else self.env.own)[arg]
        if want.whole:
            return self.env.own[arg]
        key = (arg, want)
        if key not in self.env.cut:
            self.env.cut[key] = narrowed(self.graph, self.env.own[arg], want, self.part)
        return self.env.cut[key]
