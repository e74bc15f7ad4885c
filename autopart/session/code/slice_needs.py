"""What the code of a stage's slices needs of each value: its own tokens, those before them too, and what later slices
look back at."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopart.capture import Captured
from autopart.ir.graph import Adjusted, Op
from autopart.passes.ops.flops import operands
from autopart.passes.ops.table import op_name
from autopart.passes.tokens.recipe import Recipe
from autopart.runtime.stages.stage_module import Cast
from autopart.session.code.split import adjusted_reads
from autopart.session.code.stage_graph import Draws, numbers_of

_VIEWS = ("alias", "detach", "expand", "expand_as", "broadcast_to", "permute", "squeeze", "t", "transpose", "unsqueeze")
"""Ops whose result takes no memory, however large it is."""


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


class SliceNeeds:
    """What the code of every slice of a stage computes: which values with their own tokens, which with those before
    them too, and which of those are states.

    shared: states that later slices read as one tensor, in which all slices write theirs.  full: values at full
    length that are read; prologue: those of them that no batch brings.  received: values of other stages.
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
        self._in_parts: set[str] = set()
        self._full: set[str] = set()
        for op in reversed(self.ops):
            self._see(op)
        order = [value.name for value in captured.graph.values]
        self.received = [v for v in order if v in self.own and v not in self._writer]
        self.full = [v for v in order if v in self._full]
        self.prologue = [v for v in self.full if v not in captured.graph.inputs]
        self.shared = [v for v in order if v in self.joined - self._in_parts and self._stride(v) == 1]
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
        """Keep the last value on the way here, which is read as it lies; of those that differ by views the narrowest,
        and where the tokens of several rows lie among each other, one where they do not."""
        way, views = [name], 1
        while way[-1] in self._writer and way[-1] in self.recipe.chain:
            op = self.by_name[self._writer[way[-1]]]
            if views == len(way) and op_name(op.target) in _VIEWS:
                views += 1
            way.append(self.recipe.chain[way[-1]])
        best = next((v for v in way if v in self.joined), None)
        if best is None:
            near = [v for v in way[:views] if self._stride(v) == 1]
            best = min(near or way, key=lambda v: (self._stride(v) > 1, math.prod(self.shapes[v])))
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
