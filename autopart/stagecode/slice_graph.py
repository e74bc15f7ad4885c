"""The fx graph of one slice of a stage.  A value is needed with the tokens of the slice, with those before them too, or
at full length; what later slices read is a state."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopart.capture import Captured
from autopart.ir.graph import Adjusted, Op
from autopart.ir.plan import Stage
from autopart.passes.ops.flops import operands
from autopart.passes.ops.table import op_name
from autopart.passes.tokens.recipe import Form, Recipe, Slice, TokenLayout
from autopart.runtime.stages.slice_functions import joined, last_of, part_of
from autopart.runtime.stages.stage_module import Cast, StateBuffer
from autopart.stagecode.split import adjusted_reads
from autopart.stagecode.stage_graph import Draws, numbers_of

_VIEWS = ("alias", "detach", "expand", "expand_as", "broadcast_to", "permute", "squeeze", "t", "transpose", "unsqueeze")
"""Ops whose result takes no memory, however large it is."""


class SliceNeeds:
    """The values that the code of every slice of a stage needs.

    own, prefix: values that are needed with the tokens of the slice, and with those before them too.  shared: states
    that later slices read as one tensor, to which every slice adds its part.  states: other states, with the number of
    tokens before a slice that it reads, None for all.  full: values that are read at full length; prologue: those of
    them that are not inputs of the batch.  received: values of other stages.
    """

    def __init__(
        self,
        captured: Captured,
        recipe: Recipe,
        planned: Stage,
        outputs: Sequence[str],
        adjusted: Sequence[Adjusted],
        casts: Mapping[str, Cast],
        drawn: Draws,
    ) -> None:
        self.captured, self.recipe, self.outputs = captured, recipe, tuple(outputs)
        self.casts, self.groups, self.drawn = casts, planned.recompute, drawn
        chosen = set(planned.ops)
        self.ops = [op for op in captured.graph.ops if op.name in recipe.ops and op.name in chosen - casts.keys()]
        self.by_name = {op.name: op for op in self.ops}
        nodes = [node for node in captured.module.graph.nodes if node.name in self.by_name]
        self.reads = adjusted_reads(captured, nodes, adjusted)
        self.numbers = numbers_of(nodes, self.reads)
        self.refs = {op.name: [ref[1:] for ref in operands(op)] for op in self.ops}
        self.shapes = {value.name: value.shape for value in captured.graph.values}
        self.dtypes = {value.name: value.dtype for value in captured.graph.values}
        self._cast_values = {name for op in captured.graph.ops if op.name in casts for name in op.writes}
        self._writer = {name: op.name for op in self.ops for name in op.writes}
        self.own: set[str] = set(outputs)
        self.prefix: set[str] = set()
        self.states: dict[str, int | None] = {}
        self.joined: set[str] = set()
        self._in_parts: set[str] = set()
        self._full: set[str] = set()
        for op in reversed(self.ops):
            self._see(op)
        order = [value.name for value in captured.graph.values]
        self.received = [v for v in order if v in self.own and v not in self._writer]
        self.full = [v for v in order if v in self._full]
        self.prologue = [v for v in self.full if v not in captured.graph.inputs]
        self.shared = [v for v in order if v in self.joined - self._in_parts and self.layout(v).stride == 1]
        self.states = {v: self.states[v] for v in order if v in self.states and v not in self.shared}

    def _see(self, op: Op) -> None:
        for name in op.writes:
            if name in self.prefix:
                self._see_prefix(name)
        if self.own.isdisjoint(op.writes):
            return
        recipe = self.recipe.ops[op.name]
        if recipe.how == "carry":
            self._keep(op.writes[0], recipe.amount)
            self._in_parts.add(op.writes[0])
        for ref, read in zip(self.refs[op.name], recipe.reads, strict=True):
            form = self.recipe.forms.get(ref)
            if ref not in self.shapes or ref in self._cast_values or recipe.how == "made":
                continue  # casts of parameters are given like these
            if form is None:
                self._full.add(ref)
            elif form.queries is not None and form.keys is None and read.keys is not None:
                self.prefix.add(ref)
                if ref not in self._writer:
                    self._see_prefix(ref)
            else:
                self.own.add(ref)
                if read.halo > 0 and not form.halo:
                    self._keep(ref, read.halo)
                    self._in_parts.add(ref)

    def _see_prefix(self, name: str) -> None:
        """Keep the last value on the way to this one as a state.  Of values that differ by views alone keep the
        smallest, and rather one whose tokens lie before the rows."""
        way, views = [name], 1
        while way[-1] in self._writer and way[-1] in self.recipe.chain:
            op = self.by_name[self._writer[way[-1]]]
            if views == len(way) and op_name(op.target) in _VIEWS:
                views += 1
            way.append(self.recipe.chain[way[-1]])
        best = next((v for v in way if v in self.joined), None)
        if best is None:
            near = [v for v in way[:views] if self.layout(v).stride == 1]
            best = min(near or way, key=lambda v: (self.layout(v).stride > 1, math.prod(self.shapes[v])))
        self._keep(best, self.recipe.reach.get(best))
        self.joined.add(best)
        self.own.add(best)
        self.prefix.update(way[: way.index(best) + 1])

    def _keep(self, name: str, reach: int | None) -> None:
        """Keep a value for later slices, which read `reach` tokens before them, None for all."""
        before = self.states.get(name, 0)
        self.states[name] = None if reach is None or before is None else max(reach, before)

    def layout(self, name: str) -> TokenLayout:
        """Return how a value holds its tokens."""
        layout = self.recipe.forms[name].queries
        assert layout is not None
        return layout


class SliceGraph:
    """The graph of one slice, with placeholders for what it is given: parameters, inputs, numbers, and states.

    part: the tokens of the slice.  own, prefix: nodes of this graph by captured node, with the tokens of the slice, and
    with those before them too.  added: for each shared state, the node that adds the part of this slice.
    """

    def __init__(self, needs: SliceNeeds, parts: Sequence[Slice], number: int, device: torch.device) -> None:
        self.needs, self.part, self.number, self.device = needs, parts[number], number, device
        self.graph = fx.Graph()
        self.own: dict[fx.Node, fx.Node] = {}
        self.prefix: dict[fx.Node, fx.Node] = {}
        self.added: dict[str, fx.Node] = {}
        self._cut: dict[tuple[fx.Node, Form], fx.Node] = {}
        self._parts = parts
        nodes = needs.captured.module.graph.nodes
        self.nodes = {self.name(node): node for node in nodes}
        given = {**needs.captured.names.params, **{name: f"cast {name}" for name in needs.casts}}
        params = [node for node in nodes if node.name in given and self._used(node)]
        self.params = {node: given[node.name] for node in params}
        self.inputs = [self.nodes[name] for name in (*needs.received, *needs.full)]
        for node in (*params, *self.inputs):
            self.own[node] = self.graph.placeholder(node.name)
        self.numbers = {place: self.graph.placeholder(f"number_{place}") for place in needs.numbers}
        self.past = tuple((state, earlier) for state in needs.states for earlier in self._before(state))
        self._blocks = {key: self.graph.placeholder(f"past_{self.nodes[key[0]].name}_{key[1]}") for key in self.past}
        self.places = {name: self._place(name) for name in needs.shared}
        self._rooms: dict[str, tuple[fx.Node, fx.Node | None]] = {}
        for name, place in self.places.items():
            buffer, looks_back = self.graph.placeholder(f"all_{self.nodes[name].name}"), place.start > place.low
            before = self.graph.placeholder(f"before_{self.nodes[name].name}") if looks_back else None
            self._rooms[name] = buffer, before
        for name in needs.received:
            self.join(name)

    def name(self, node: fx.Node) -> str:
        """Return the name of a node's value or parameter."""
        names = self.needs.captured.names
        return names.params.get(node.name, names.value(node))

    def _used(self, node: fx.Node) -> bool:
        needs = self.needs
        readers = (needs.by_name[user.name] for user in node.users if user.name in needs.by_name)
        return any(not (needs.own | needs.prefix).isdisjoint(op.writes) for op in readers)

    def _place(self, name: str) -> StateBuffer:
        """Return where a state lies in the tensor that slices share, and what this slice reads of it."""
        layout, needs = self.needs.layout(name), self.needs
        held = replace(layout, reach=needs.recipe.reach.get(name))
        low, _ = (layout.block * token for token in held.bounds(self.part, prefix=True))
        start, end = (layout.block * token for token in layout.bounds(self.part, prefix=False))
        dtype = self.nodes[name].meta["val"].dtype
        return StateBuffer(name, needs.shapes[name], dtype, self.device, layout.axis, min(low, start), start, end)

    def _before(self, state: str) -> list[int]:
        """Return the earlier slices whose part of a state this one reads."""
        reach, layout = self.needs.states[state], self.needs.layout(state)
        if reach is None:
            return list(range(self.number))
        start = layout.bounds(self.part, prefix=False)[0]
        ends = [layout.bounds(part, prefix=False)[1] for part in self._parts[: self.number]]
        return [number for number, end in enumerate(ends) if end > start - reach]

    def join(self, name: str) -> None:
        """Join the value of this slice with its tokens before, if an op reads them."""
        if name not in self.needs.joined:
            return
        node, layout = self.nodes[name], self.needs.layout(name)
        if name in self.places:
            buffer, before_it = self._rooms[name]
            both = self.graph.call_function(self.places[name].append, (buffer, self.own[node], before_it))
            self.added[name] = self.graph.call_function(operator.getitem, (both, 0))
            self.prefix[node] = self.graph.call_function(operator.getitem, (both, 1))
            return
        held = replace(layout, reach=self.needs.recipe.reach.get(name))
        self.prefix[node] = self._from(node, held.bounds(self.part, prefix=True)[0])

    def _from(self, node: fx.Node, low: int) -> fx.Node:
        """Return a value with the tokens from `low` up to the end of the slice."""
        name, layout = self.name(node), self.needs.layout(self.name(node))
        before = self._before(name)
        if not before:
            return self.own[node]
        every = [self._blocks[name, number] for number in before] + [self.own[node]]
        found = self.graph.call_function(joined, (every, layout.axis, layout.stride))
        first = layout.bounds(self._parts[before[0]], prefix=False)[0]
        if low > first:  # the oldest part has tokens that are not needed
            there = layout.bounds(self.part, prefix=False)[1] - first
            found = self.graph.call_function(part_of, (found, layout.axis, layout.stride, there, low - first, there))
        return found

    def last_before(self, name: str) -> fx.Node | None:
        """Return the last token of a state before this slice; None in the first slice."""
        layout = self.needs.layout(name)
        sizes = [layout.size(part, prefix=False) for part in self._parts[: self.number]]
        filled = [number for number, size in enumerate(sizes) if size]  # of a value without the last tokens not all are
        if not filled:
            return None
        return self.graph.call_function(last_of, (self._blocks[name, filled[-1]], layout.axis))

    def read(self, arg: fx.Node, want: Form, *, prefix: bool) -> fx.Node:
        """Return what an op reads of a value.  want: the form that it needs; prefix: whether the op runs on the tokens
        before the slice too."""
        name = self.name(arg)
        form = self.needs.recipe.forms.get(name)
        if form is not None and not form.whole:
            if want.halo > 0 and not form.halo:
                start = self.needs.layout(name).bounds(self.part, prefix=False)[0]
                return self._from(arg, max(0, start - want.halo))
            wide = prefix or (want.keys is not None and form.keys is None)
            return (self.prefix if wide and form.keys is None and form.queries else self.own)[arg]
        if want.whole:
            return self.own[arg]
        key = (arg, want)
        if key not in self._cut:
            self._cut[key] = self._narrowed(self.own[arg], want)
        return self._cut[key]

    def _narrowed(self, node: fx.Node, want: Form) -> fx.Node:
        """Return a whole value cut to the tokens that are wanted."""
        for prefix, layout in want.roles():
            low, high = layout.bounds(self.part, prefix=prefix)
            most = self.part.tokens - layout.short
            if (low, high) != (0, most):
                node = self.graph.call_function(part_of, (node, layout.axis, layout.stride, most, low, high))
        return node
