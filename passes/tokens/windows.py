"""How far back a slice looks: where masks hide all keys but those of a window, older ones are neither joined nor read.

Ops that share an axis of keys form a group, which has the reach of its masks: the proof that they hide what is later
(`Causality`) is asked again about what is older.  A window is looked for among the constants that the first proof met.
A group stays as it is where a sum over keys relies on anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopart.passes.ops.flops import operands
from autopart.passes.tokens.causality import Causality
from autopart.passes.tokens.context import Model
from autopart.passes.tokens.places import NEGATIVE
from autopart.passes.tokens.recipe import CAUSAL, DIAGONAL, Form, OpRecipe


@dataclass(frozen=True)
class Windows:
    """What a recipe says of windows: forms and ops with how far their keys reach, and the same of values of which the
    tokens before the slice are needed (`Recipe.reach`)."""

    forms: dict[str, Form]
    ops: dict[str, OpRecipe]
    reach: dict[str, int]


def windows(model: Model, ops: Mapping[str, OpRecipe], chain: Mapping[str, str], causality: Causality) -> Windows:
    """How far back every group of ops looks.  causality: with all that ops relied on.  O(ops + windows * masks)."""
    forms, changed, reach = dict(model.forms), dict(ops), dict[str, int]()
    sizes = {causality.furthest(*seen) for seen in causality.seen} - {None}
    proofs = [Causality(model, size) for size in sorted(s for s in sizes if s is not None and s < model.tokens - 1)]
    for members, values in _groups(model, ops, chain) if proofs else ():
        found = _reach(members, ops, causality, proofs)
        if found is None:
            continue
        for name in members:
            reads = tuple(form.reaching(found) for form in ops[name].reads)
            changed[name] = replace(ops[name], reads=reads)
        for name in values:
            if forms[name].keys is not None:
                forms[name] = forms[name].reaching(found)
            else:
                reach[name] = found
    return Windows(forms, changed, reach)


def _reach(
    members: list[str], ops: Mapping[str, OpRecipe], causality: Causality, proofs: list[Causality]
) -> int | None:
    """The reach of a group of ops; None where some key is not hidden however old it is."""
    asked = [question for name in members for question in causality.asked.get(name, ())]
    if not asked or any(ops[name].how in (CAUSAL, DIAGONAL) for name in members):
        return None
    for proof in proofs:
        hidden = all(proof.holds(*question) for question in asked)
        if hidden and all(causality.covers(place, proof) for place, what in asked if what == NEGATIVE):
            return proof.reach
    return None


def _groups(model: Model, ops: Mapping[str, OpRecipe], chain: Mapping[str, str]) -> list[tuple[list[str], list[str]]]:
    """(ops, values) that share an axis of keys: a value that is needed with the tokens before the slice shares it, and
    so do those that it is made of."""
    shared = _Together()
    for op in model.graph.ops:
        if op.name not in ops:
            continue
        refs = [ref[1:] for ref in operands(op)]
        held = [name for name in (*refs, *op.writes) if name in model.forms and model.forms[name].keys is not None]
        for ref, read in zip(refs, ops[op.name].reads, strict=True):
            while read.keys is not None and ref in model.forms and model.forms[ref].keys is None:
                held.append(ref)
                if ref not in chain:
                    break
                shared.join((False, ref), (False, chain[ref]))
                ref = chain[ref]
        for name in held:
            shared.join((True, op.name), (False, name))
    return [
        ([name for is_op, name in group if is_op], [name for is_op, name in group if not is_op])
        for group in shared.groups()
    ]


_Node = tuple[bool, str]
"""An op (True) or a value, by name."""


class _Together:
    """What was joined, directly or through others (union-find)."""

    def __init__(self) -> None:
        self._above: dict[_Node, _Node] = {}

    def _top(self, node: _Node) -> _Node:
        above = self._above.setdefault(node, node)
        while above != node:
            self._above[node] = self._above[above]
            node, above = above, self._above[above]
        return node

    def join(self, a: _Node, b: _Node) -> None:
        """These two belong together."""
        self._above[self._top(a)] = self._top(b)

    def groups(self) -> list[list[_Node]]:
        """All groups, in the order in which they were met."""
        found: dict[_Node, list[_Node]] = {}
        for node in list(self._above):
            found.setdefault(self._top(node), []).append(node)
        return list(found.values())
