"""The plain rule of tensor parallelism: what the ranks of a shard group divide.

1. A digit that a weight makes and a later weight sums over, with nothing between that mixes it, is cut: attention
   heads, the hidden axis of an MLP.  The first product runs on its own columns, the second adds over the ranks
   (Megatron-LM, arXiv 1909.08053, section 3).
2. The vocabulary is cut: of the largest table, and of the head whose classes a cross entropy reads.
3. Everything else runs along tokens, if their number can be divided (sequence parallelism, arXiv 2205.05198), else
   whole on every rank.
A parameter is held in parts where all its readers want the same part.  Of equal blocks in a row only a few are looked
at (`equal_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from autopart.ir.graph import Graph
from autopart.passes.shards.assignment import Assignment, check
from autopart.passes.shards.calls import Call, calls_of
from autopart.passes.shards.equal_blocks import counted, shortened
from autopart.passes.shards.factors import factors_of
from autopart.passes.shards.facts import (
    Facts,
    facts_of,
    learning_values,
    require_cuts,
    token_digits,
    weight_place,
)
from autopart.passes.shards.states import COPY, CUT_KIND, PARTIAL_KIND, State, passes
from autopart.passes.shards.strategies import NO_DIGIT, VOCABULARY, Strategy, uniform

Held = tuple[tuple[str, State], ...]
"""How ranks hold the parameters that they divide under a plan, by name."""


@lru_cache(maxsize=16)
def choose(graph: Graph, shards: int, held: Held | None = None, *, sequence: bool = True) -> Assignment:
    """Return the assignment of the plain rule, checked; cached.  sequence: whether tokens may be cut.  held: what a
    plan divides, which other graphs of its model (other rows, evaluation) follow; None to find it.

    Raises RefusedError (`require_cuts`).  O(reads), and O(axes) of blocks that differ."""
    few, left_out = shortened(graph, dict(held) if held else None)
    assignment = chosen_op_by_op(few, shards, held, sequence=sequence, times=counted(graph, left_out))
    strategies, states = dict(assignment.strategies), dict(assignment.states)
    for each in reversed(left_out):
        strategies.update((name, strategies[kept]) for name, kept in each.ops.items())
        states.update((name, states[kept]) for name, kept in each.tensors.items())
    if any(not strategies[one].is_like(strategies[other]) for each in left_out for one, other in each.again):
        return chosen_op_by_op(graph, shards, held, sequence=sequence)
    return Assignment(shards, strategies, dict.fromkeys((p.name for p in graph.params), COPY) | states)


def chosen_op_by_op(
    graph: Graph,
    shards: int,
    held: Held | None = None,
    *,
    sequence: bool = True,
    times: Mapping[str, int] | None = None,
) -> Assignment:
    """Return what `choose` does, by looking at every op.  times: how many ops each stands for, one without."""
    calls = calls_of(graph)
    factors = factors_of(graph, calls)
    facts = facts_of(graph, calls, factors, shards)
    if held is None:
        require_cuts(calls, facts)
    else:
        facts.hold(held, graph)
    if sequence:
        facts.tokens = token_digits(calls, facts, times or {})
    return check(_Choice(graph, facts).run(calls), graph, factors, calls)


def pieces_of(graph: Graph, shards: int) -> dict[str, State]:
    """Return the cut of each parameter of which every rank of a group holds a part."""
    return choose(graph, shards).pieces(graph)


class _Choice:
    """Goes through the ops in order; what only moves a parameter waits for what its readers want."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._graph, self._facts = graph, facts
        self._grads = learning_values(graph) | {p.name for p in graph.params if p.kind == "param"}
        self._chosen: dict[str, Strategy] = {}
        self._states: dict[str, State] = dict.fromkeys((*graph.inputs, *(p.name for p in graph.params)), COPY)
        self._digits: dict[str, int] = {}
        self._wanted: dict[str, set[tuple[State, int]]] = {}

    def run(self, calls: list[Call]) -> Assignment:
        """Return the assignment."""
        weights, waiting = self._facts.weights, []
        for call in calls:
            if call.op.writes and call.op.writes[0] in weights:
                waiting.append(call)
                self._states[call.op.writes[0]] = COPY
            else:
                self._take(call, self._decided(call))
        for call in reversed(waiting):
            self._take(call, self._moved(call))
        for param in self._graph.params:
            held = self._facts.held
            state = self._at_rest(param.name) if held is None else held.get(param.name)
            if state is not None and param.kind == "param":
                self._states[param.name] = state
        return Assignment(self._facts.shards, self._chosen, self._states)

    def _take(self, call: Call, chosen: Strategy) -> None:
        self._chosen[call.op.name] = chosen
        for name, state in zip(call.reads, chosen.reads, strict=True):
            if name in self._facts.weights:
                self._wanted.setdefault(name, set()).add((state, chosen.digit))
        for name, state in zip(call.op.writes, chosen.writes, strict=True):
            self._states[name] = state
            self._digits[name] = chosen.digit

    def _at_rest(self, name: str) -> State | None:
        """Return the one cut in which all readers want a value; None if they differ.  A cut along tokens does not
        count: batches have sequences of other lengths."""
        wanted = self._wanted.get(name, set())
        states = {state for state, _ in wanted}
        digits = {digit for _, digit in wanted}
        if len(states) != 1 or not digits.isdisjoint(self._facts.tokens):
            return None
        (state,) = states
        return state if state.kind == CUT_KIND else None

    def _moved(self, call: Call) -> Strategy:
        """Return how a parameter is viewed or cast: in the parts that readers want, else whole with partial
        gradients."""
        wanted = self._at_rest(call.op.writes[0])
        found = (each for each in self._facts.options[call.op.name] if each.writes == (wanted,))
        return next(found, uniform(call, COPY))

    def _decided(self, call: Call) -> Strategy:
        facts, options = self._facts, self._facts.options[call.op.name]
        if self._grads.isdisjoint(call.reads) and self._grads.isdisjoint(call.op.writes):
            return options[0]
        place = weight_place(call, facts.weights)
        if place is not None:
            found = self._by_weight(call, place, options)
            if found is not None:
                return found
        cuts = {n for n in call.reads if n in self._grads and self._states[n].kind == CUT_KIND}
        other = {self._digits[name] for name in cuts if name in self._digits}
        if other <= set(facts.tokens):
            for digit in facts.tokens:
                along = next((each for each in options if each.digit == digit), None)
                if along is not None:
                    return along
        if not cuts:
            return options[0]
        fit = [each for each in options if each.digit != NO_DIGIT]
        going_on = [each for each in fit if each.digit in other - set(facts.tokens)]
        if going_on:
            return min(going_on, key=lambda each: self._bytes(call, each))
        return min((options[0], *fit), key=lambda each: (self._bytes(call, each), each.digit == NO_DIGIT))

    def _by_weight(self, call: Call, place: int, options: list[Strategy]) -> Strategy | None:
        """Return how an op with a weight runs whose weight is cut."""
        facts = self._facts
        cutting = [each for each in options if each.digit != NO_DIGIT and each.reads[place].kind == CUT_KIND]
        for each in cutting:  # rows of the weight, where the other operand has come in these parts
            read = [n for n, state in enumerate(each.reads) if state.kind == CUT_KIND and n != place]
            if all(w.kind == PARTIAL_KIND for w in each.writes) and any(
                self._states[call.reads[n]] == each.reads[n] for n in read
            ):
                return each
        chosen = facts.kept | facts.vocabulary
        for each in cutting:
            whole = all(state.kind == CUT_KIND for state in each.writes)
            if each.digit in chosen and (whole or each.how == VOCABULARY):
                return each
        return None

    def _bytes(self, call: Call, strategy: Strategy) -> int:
        """Return the bytes that pass a link, both ways, if an op runs like this."""
        found = 0
        for name, wanted in zip(call.reads, strategy.reads, strict=True):
            forward, backward = passes(self._states[name], wanted)
            found += (forward + backward * (name in self._grads)) * prod(call.shape(name))
        return found
