"""Captured + recipe + lengths -> the code of a stage for each slice of tokens.

The flat graph is cut as `split` cuts it, once for every slice: sizes are those of the slice, values of the prologue and
whole values are cut to the tokens that an op needs, and a value that is needed with the tokens before it is joined from
the blocks that earlier slices made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import torch
from torch import fx, nn

from autopart.capture import Captured
from autopart.capture.to_graph import results_of
from autopart.ir.errors import UsageError
from autopart.ir.graph import Adjusted, Op
from autopart.passes.ops.flops import operands
from autopart.passes.tokens.causality import lowest
from autopart.passes.tokens.recipe import Guard, Recipe, Slice, TokenLayout
from autopart.runtime.casts import Cast
from autopart.runtime.slice_module import KeysSeen, SlicedStage, SliceModule, joined, last_of, part_of
from autopart.runtime.stage_module import StageModule
from autopart.session.slice_ops import emit, narrowed
from autopart.session.split import adjusted_reads, cut
from autopart.session.stage_graph import Draws, numbers_of, stage_graph

_aten = torch.ops.aten


@dataclass(frozen=True)
class Extras:
    """What a stage does beside running its ops.

    casts: of its ops those that are given (`split.cut`).  groups: of its ops that each slice runs again in its
    backward; what later slices look back at is kept all the same.  adjusted: values that are read otherwise than they
    were made.  drawn: random ops that draw for other replicas too.
    """

    casts: Mapping[str, Cast] = field(default_factory=dict)
    groups: Sequence[Collection[str]] = ()
    adjusted: Sequence[Adjusted] = ()
    drawn: Draws = field(default_factory=dict)


def slice_stage(
    captured: Captured,
    recipe: Recipe,
    ops: Collection[str],
    outputs: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    extras: Extras | None = None,
) -> SlicedStage:
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
    needs = _Needs(captured, recipe, ops, [name for name in outputs if name in recipe.forms], extras)
    bounds = pairwise(accumulate(lengths, initial=0))
    parts = [Slice(start, end, recipe.tokens) for start, end in bounds]
    slices = tuple(_Builder(needs, parts, number, device).module() for number in range(len(parts)))
    checks = tuple(keys_seen(guard, needs.dtypes) for guard in recipe.guards if guard.op in needs.by_name)
    inputs, masks = set(captured.graph.inputs), (name for check in checks for name in check.values)
    wanted = [name for name in dict.fromkeys((*needs.prologue, *masks)) if name not in inputs]
    before = behind(captured, recipe, wanted)
    prologue = cut(captured, before, wanted, device, adjusted=extras.adjusted) if wanted else None
    return SlicedStage(prologue, slices, checks)


def keys_seen(guard: Guard, dtypes: Mapping[str, str]) -> KeysSeen:
    """What checks a guard.  dtypes: of values."""
    masks = []
    for mask in guard.masks:
        limit = lowest(dtypes[mask.value]) if mask.hides == "negative" else None
        masks.append((mask.value, mask.queries, mask.keys, limit))
    return KeysSeen(guard.op, tuple(masks), tuple(mask.hides == "true" for mask in guard.masks), guard.lifts)


def behind(captured: Captured, recipe: Recipe, values: Iterable[str]) -> list[str]:
    """The ops of the prologue that these values depend on."""
    needed, ops = set(values), []
    for op in reversed(captured.graph.ops):
        if op.name in recipe.prologue and needed.intersection(op.writes):
            ops.append(op.name)
            needed.update(op.reads)
    return ops


class _Needs:
    """What the code of every slice of a stage computes: which values with their own tokens, which with those before
    them too, and which of those are states.

    prologue: values at full length that are read.  received: values of other stages.
    """

    def __init__(
        self,
        captured: Captured,
        recipe: Recipe,
        ops: Collection[str],
        outputs: Sequence[str],
        extras: Extras,
    ) -> None:
        self.captured, self.recipe, self.outputs = captured, recipe, tuple(outputs)
        self.casts, self.groups, self.drawn = extras.casts, extras.groups, extras.drawn
        casts, chosen = extras.casts, set(ops)
        self.ops = [op for op in captured.graph.ops if op.name in recipe.ops and op.name in chosen - casts.keys()]
        self.by_name = {op.name: op for op in self.ops}
        nodes = [node for node in captured.module.graph.nodes if node.name in self.by_name]
        self.reads = adjusted_reads(captured, nodes, extras.adjusted)
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
        self._full: set[str] = set()
        for op in reversed(self.ops):
            self._see(op)
        order = [value.name for value in captured.graph.values]
        self.received = [v for v in order if v in self.own and v not in self._writer]
        self.prologue = [v for v in order if v in self._full]
        self.states = {v: self.states[v] for v in order if v in self.states}

    def _see(self, op: Op) -> None:
        for name in op.writes:
            if name in self.prefix:
                self._see_prefix(name)
        if self.own.isdisjoint(op.writes):
            return
        recipe = self.recipe.ops[op.name]
        if recipe.how == "carry":
            self._keep(op.writes[0], recipe.amount)
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

    def _see_prefix(self, name: str) -> None:
        """Keep the narrowest value on the way here: of equals the last, for what follows runs on all tokens before."""
        way = [name]
        while way[-1] in self._writer and way[-1] in self.recipe.chain:
            way.append(self.recipe.chain[way[-1]])
        best = next((v for v in way if v in self.joined), None)
        if best is None:
            best = min(way, key=lambda v: (self._stride(v) > 1, math.prod(self.shapes[v])))
        self._keep(best, self.recipe.reach.get(best))
        self.joined.add(best)
        self.own.add(best)
        self.prefix.update(way[: way.index(best) + 1])

    def _keep(self, name: str, reach: int | None) -> None:
        """Later slices read so many tokens before them, None for all."""
        before = self.states.get(name, 0)
        self.states[name] = None if reach is None or before is None else max(reach, before)

    def _stride(self, name: str) -> int:
        layout = self.recipe.forms[name].queries
        assert layout is not None
        return layout.stride


@dataclass
class _Env:
    """Nodes of the code that is made, by captured node: own tokens, with those before, and cut ones by how."""

    own: dict[fx.Node, fx.Node]
    prefix: dict[fx.Node, fx.Node]
    cut: dict[tuple[Any, ...], fx.Node]


class _Builder:
    """Makes the code of one slice."""

    def __init__(self, needs: _Needs, parts: Sequence[Slice], number: int, device: torch.device) -> None:
        self.needs, self.part, self.number, self.last = needs, parts[number], number, number == len(parts) - 1
        self._parts = parts
        self.device = device
        self.graph = fx.Graph()
        self.env = _Env({}, {}, {})
        self.numbers: dict[int, fx.Node] = {}
        self._made: dict[str, list[str]] = {}
        self._captured = needs.captured
        self._nodes = {self.name(node): node for node in self._captured.module.graph.nodes}

    def name(self, node: fx.Node) -> str:
        """The name of a node's value or parameter."""
        return self._captured.names.params.get(node.name, self._captured.names.value(node))

    def module(self) -> SliceModule:
        """The code of the slice."""
        needs, captured = self.needs, self._captured
        given = {**captured.names.params, **{name: f"cast {name}" for name in needs.casts}}
        params = [node for node in captured.module.graph.nodes if node.name in given and self._used(node)]
        inputs = [self._nodes[name] for name in (*needs.received, *needs.prologue)]
        for node in (*params, *inputs):
            self.env.own[node] = self.graph.placeholder(node.name)
        self.numbers = {place: self.graph.placeholder(f"number_{place}") for place in needs.numbers}
        past = [(state, number) for state in needs.states for number in self._before(state)]
        self._blocks = {key: self.graph.placeholder(f"past_{self._nodes[key[0]].name}_{key[1]}") for key in past}
        for name in needs.received:
            self._join(name)
        for node in captured.module.graph.nodes:
            if node.op == "call_function" and node not in self.env.own:
                before = next(reversed(self.graph.nodes))
                self._emit(node)
                self._made[node.name] = [one.name for one in self._since(before) if one.target is not part_of]
        states = () if self.last else tuple(needs.states)
        results = [self.env.own[self._nodes[name]] for name in (*needs.outputs, *states)]
        names = tuple(given[node.name] for node in params)
        constants = {n: captured.tensors[n].to(self.device) for n in names if captured.names.kinds.get(n) == "constant"}
        code = StageModule(
            self._code(results),
            names,
            tuple(self.name(node) for node in inputs),
            needs.outputs,
            (),
            constants,
            needs.numbers,
            casts={given[node.name]: needs.casts[node.name] for node in params if node.name in needs.casts},
        )
        return SliceModule(code, self.part.start, self.part.end, tuple(needs.received), states, tuple(past))

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
