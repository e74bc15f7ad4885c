"""How the ranks of a shard group divide slices of tokens: with tokens cut inside each slice where every slice has equal
parts for all of them, else without, along heads, hidden axes and words alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Op
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.calls import Call, bounds_of, calls_of
from autopart.passes.shards.choice import Held, choose
from autopart.passes.shards.states import CUT_KIND, PARTIAL_KIND, WHOLE, State
from autopart.passes.shards.strategies import SECTION, Strategy
from autopart.passes.tokens.recipe import (
    DRAWN,
    LOSS,
    MADE,
    MEAN,
    ONCE,
    PLAIN,
    SHIFT,
    SIZES,
    Form,
    OpRecipe,
    Recipe,
    TokenLayout,
)

_ANY_TOKENS = (PLAIN, SIZES, LOSS, MEAN, MADE, ONCE, DRAWN)
"""Ways to run an op in a slice that do not depend on which of its tokens a rank has."""


def choice_for(
    graph: Graph, shards: int, recipe: Recipe | None, lengths: Sequence[int], held: Held | None = None
) -> Assignment:
    """Return what ranks divide: of whole sequences (no recipe) by the plain rule; of slices of these lengths with
    tokens cut, if all slices have equal parts, else without.  held: as in `choose`; of slices that of whole sequences.

    Raises RefusedError (`choose`, and where neither is exact).  O(reads)."""
    if recipe is None:
        return choose(graph, shards, held)
    held = tuple(choose(graph, shards).pieces(graph).items()) if held is None else held
    problem: tuple[Op, str] | None = None
    for sequence in (True, False):
        found = choose(graph, shards, held, sequence=sequence)
        problem = sliced_problem(graph, found, recipe, lengths)
        if problem is None:
            return found
    assert problem is not None
    op, why = problem
    raise RefusedError(
        f"slices of {', '.join(map(str, lengths))} tokens cannot be divided among {shards} ranks",
        where=f"module {op.module} at {op.where}",
        why=why,
        fix="leave token_slices out, or use tensor_parallel=1",
    )


def kept_state(assignment: Assignment, recipe: Recipe, name: str) -> State:
    """Return the state in which slices keep a value for later ones: with all of its tokens."""
    state, tokens = assignment.states[name], recipe.form(name).queries
    return WHOLE if tokens is not None and state.kind == CUT_KIND and state.axis == tokens.axis else state


def sliced_problem(
    graph: Graph, assignment: Assignment, recipe: Recipe, lengths: Sequence[int]
) -> tuple[Op, str] | None:
    """Return the first op that ranks cannot divide so in slices of these lengths, and why; None without."""
    for call in calls_of(graph):
        why = next(why_not(call, assignment.strategies[call.op.name], recipe, lengths, assignment.shards), None)
        if why is not None:
            return call.op, why
    return None


def why_not(call: Call, strategy: Strategy, recipe: Recipe, lengths: Sequence[int], shards: int) -> Iterator[str]:
    """Yield why an op of these slices cannot run as it does on whole sequences."""
    op, own = call.op, recipe.ops.get(call.op.name)
    if own is None:
        if any(state.kind in (CUT_KIND, PARTIAL_KIND) for state in (*strategy.reads, *strategy.writes)):
            yield "it runs at full length, in every stage that needs it, and would be divided"
        return
    if strategy.how == SECTION and not _one_section(call, own):
        yield "it takes parts of the tokens out of a sequence"
    if call.name == "cat" and own.how == SHIFT and len(set(strategy.reads)) > 1:
        yield "it joins tokens, of which a slice has some of the parts, and reads them in unlike states"
    reads = zip(call.reads, own.reads, strategy.reads, strict=True)
    writes = [(name, recipe.form(name), state) for name, state in zip(op.writes, strategy.writes, strict=True)]
    for name, form, state in (*reads, *writes):
        why = _unequal(name, form, state, own, recipe, lengths, shards)
        if why:
            yield why


def _one_section(call: Call, own: OpRecipe) -> bool:
    """Return whether a slice leaves the tokens alone, or takes all of them."""
    tokens = {layout.axis for form in own.reads for _, layout in form.roles()}
    return call.dim() not in tokens or bounds_of(call) == [(0, call.shape(call.reads[0])[call.dim()])]


def _unequal(
    name: str, form: Form, state: State, own: OpRecipe, recipe: Recipe, lengths: Sequence[int], shards: int
) -> str:
    """Return why a cut is none of the same tokens in every slice, "" if it is, or leaves tokens alone."""
    if state.kind != CUT_KIND:
        return ""
    if form.order is not None and state.axis == 0:
        return f"{name} is sorted, and would be divided"
    for prefix, layout in form.roles():
        if layout.axis != state.axis:
            continue
        if own.how not in _ANY_TOKENS or form.halo:
            return f"it reads tokens before those of a slice, and {name} would be divided along tokens"
        if state.before != layout.stride:
            return f"{name} has tokens and what is divided on one axis"
        if any(tokens % shards for tokens in _tokens(layout, recipe, lengths, prefix=prefix)):
            return f"{name} has tokens in a slice that {shards} ranks cannot divide equally"
    return ""


def _tokens(layout: TokenLayout, recipe: Recipe, lengths: Sequence[int], *, prefix: bool) -> Iterator[int]:
    for part in recipe.slices(lengths):
        low, high = layout.bounds(part, prefix=prefix)
        yield high - low
