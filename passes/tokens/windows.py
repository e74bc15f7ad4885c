"""Sliding windows: where masks hide old keys too, slices neither keep nor read them.

Ops that share an axis of keys form a group, which reads back as far as all its masks show: what was proven of later
keys (`causality`) is asked again of old ones.  A group reads all keys where it relies on anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopart.ir.graph import Graph
from autopart.passes.ops.flops import operands
from autopart.passes.tokens.recipe import CAUSAL, DIAGONAL, Claim, Form, OpRecipe


def limit_windows(
    graph: Graph,
    ops: Mapping[str, OpRecipe],
    chain: Mapping[str, str],
    reach_of: Callable[[Sequence[Claim]], int | None],
) -> tuple[dict[str, OpRecipe], dict[str, int]]:
    """The recipes with their keys limited to windows, and the reach of values that are read with earlier tokens.

    chain: see `Recipe`.  reach_of: the window that claims prove, None for all keys.  O(ops + windows * masks).
    """
    changed, reach = dict(ops), dict[str, int]()
    for members, values in _groups(graph, ops, chain):
        claims = [claim for name in members for claim in ops[name].relies_on]
        own = None if any(ops[name].how in (CAUSAL, DIAGONAL) for name in members) else reach_of(claims)
        if own is None:
            continue
        for name in members:
            recipe = ops[name]
            reads = tuple(form.reaching(own) for form in recipe.reads)
            results = {result: form.reaching(own) for result, form in recipe.results.items()}
            changed[name] = replace(recipe, reads=reads, results=results)
        reach.update(dict.fromkeys(values, own))
    return changed, reach


def _groups(
    graph: Graph, ops: Mapping[str, OpRecipe], chain: Mapping[str, str]
) -> Iterator[tuple[list[str], list[str]]]:
    """(ops, values of own tokens that they read with earlier ones) that share an axis of keys."""
    forms: dict[str, Form] = {name: form for recipe in ops.values() for name, form in recipe.results.items()}
    groups: dict[tuple[str, str], set[tuple[str, str]]] = {}  # of ("op", name) and ("value", name)

    def join(a: tuple[str, str], b: tuple[str, str]) -> None:
        small, large = sorted((groups.get(a, {a}), groups.get(b, {b})), key=len)
        large |= small
        groups.update(dict.fromkeys((a, b, *small), large))

    for op in graph.ops:
        if op.name not in ops:
            continue
        refs = [ref[1:] for ref in operands(op)]
        held = [name for name in (*refs, *op.writes) if name in forms and forms[name].keys is not None]
        for ref, read in zip(refs, ops[op.name].reads, strict=True):
            if read.keys is not None and ref in forms and forms[ref].keys is None:
                held.append(ref)
                while ref in chain:  # what a value is made of shares its axis too
                    join(("value", ref), ("value", chain[ref]))
                    ref = chain[ref]
        for name in held:
            join(("op", op.name), ("value", name))
    for joined in {id(group): group for group in groups.values()}.values():
        group = sorted(joined)  # the order of a set differs between processes
        values = [name for kind, name in group if kind == "value" and forms[name].keys is None]
        yield [name for kind, name in group if kind == "op"], values
