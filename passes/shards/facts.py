"""What a graph says of its digits: which a weight makes and another sums over, which are words and which tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph
from autopart.passes.ops.row import MATMUL, VIEW
from autopart.passes.shards.calls import ATTENTION, EMBEDDING, ENTROPY, Call
from autopart.passes.shards.factors import Factors
from autopart.passes.shards.states import CUT_KIND, State
from autopart.passes.shards.strategies import NO_DIGIT, Strategy, digits_of, every_way

WAY_OUT = "use a tensor_parallel that divides it, or 1"


@dataclass
class Facts:
    """What is known of a graph before its ops are gone through.

    every, options: the ways to run each op, on any number of ranks and on these.  weights: values that are made of one
    parameter by views and casts, with its name.
    made, summed: digits that a product makes from its weight, or sums over.  mixed: digits that some op with a gradient
    neither keeps apart nor sums in a product with a weight.  vocabulary: digits of words.  rows: digits of the batch.
    tokens: digits of tokens, those of most bytes first.  held: how a plan that was made holds parameters, and
    held_digits: what it cuts.
    """

    factors: Factors
    shards: int
    every: dict[str, list[Strategy]] = field(default_factory=dict)
    options: dict[str, list[Strategy]] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    vocabulary: set[int] = field(default_factory=set)
    rows: frozenset[int] = frozenset()
    tokens: tuple[int, ...] = ()
    held: Mapping[str, State] | None = None
    held_digits: frozenset[int] = frozenset()

    def hold(self, held: Iterable[tuple[str, State]], graph: Graph) -> None:
        """Follow a plan that divides these parameters."""
        params = graph.param_map()
        self.held = {name: state for name, state in held if name in params}
        places = [self.factors.befores(n, s.axis) for n, s in self.held.items()]
        pairs = zip(self.held.values(), places, strict=True)
        self.held_digits = frozenset(digit for state, own in pairs for digit, before in own if before == state.before)

    @property
    def kept(self) -> set[int]:
        """The digits that stay apart from a weight that makes them to one that sums over them; those that a plan
        divides, if it is given."""
        if self.held is not None:
            return set(self.held_digits)
        return (self.made & self.summed) - self.mixed - self.vocabulary - self.rows

    def divides(self, digit: int) -> bool:
        """Return whether a digit has equal parts for all ranks."""
        return self.factors.size(digit) % self.shards == 0


def facts_of(graph: Graph, calls: Sequence[Call], factors: Factors, shards: int) -> Facts:
    """Return the facts of a graph.  O(axes)."""
    facts = Facts(factors, shards, rows=row_digits(graph, factors))
    facts.weights = {p.name: p.name for p in graph.params if p.kind == "param"}
    grads = learning_values(graph)
    tables = [call for call in calls if call.name == EMBEDDING and call.reads[0] in facts.weights]
    largest = max(tables, key=lambda call: call.shape(call.reads[0])[0], default=None)
    for call in calls:
        if _is_derived(call, facts.weights):
            facts.weights[call.op.writes[0]] = facts.weights[call.reads[0]]
        options = facts.every[call.op.name] = every_way(call, factors)
        facts.options[call.op.name] = [
            each
            for each in options
            if each.digit == NO_DIGIT or (facts.divides(each.digit) and each.digit not in facts.rows)
        ]
        kept = {each.digit for each in options if _cuts_all(each)}
        added = {each.digit for each in options if each.digit != NO_DIGIT} - kept
        allowed = _note(facts, call, kept, added, is_vocabulary=call is largest)
        if not (grads.isdisjoint(call.reads) and grads.isdisjoint(call.op.writes)):
            facts.mixed |= digits_of(call, factors) - kept - allowed
    facts.vocabulary -= facts.mixed | facts.rows
    return facts


def learning_values(graph: Graph) -> set[str]:
    """Return the values with a gradient; of a graph without any, as in evaluation, all numbers."""
    return {v.name for v in graph.values if v.grad} or {v.name for v in graph.values if "float" in v.dtype}


def _note(facts: Facts, call: Call, kept: set[int], added: set[int], *, is_vocabulary: bool) -> set[int]:
    """Note what an op says of digits, and return those that it may sum over."""
    factors = facts.factors
    if call.name == ENTROPY or is_vocabulary:
        words = set(factors.of(call.reads[0], 1 if call.name == ENTROPY else 0)[:1])
        facts.vocabulary |= words
        return words
    place = weight_place(call, facts.weights)
    if place is None or call.row.family != MATMUL or call.row.linear != "product":
        return set()
    own = set(factors.flat(call.reads[place]))
    facts.made |= own & kept
    facts.summed |= own & added
    return added


def _cuts_all(strategy: Strategy) -> bool:
    return strategy.digit != NO_DIGIT and all(state.kind == CUT_KIND for state in strategy.writes)


def _is_derived(call: Call, weights: Collection[str]) -> bool:
    """Return whether an op is a view or cast of a parameter alone."""
    moves = call.reshapes or call.row.family == VIEW or call.name == "_to_copy"
    return moves and len(call.reads) == 1 and len(call.op.writes) == 1 and call.reads[0] in weights


def weight_place(call: Call, weights: Collection[str]) -> int | None:
    """Return which operand of an op is a parameter, the one of most axes; None without."""
    places = [place for place, name in enumerate(call.reads) if name in weights]
    return max(places, key=lambda place: len(call.shape(call.reads[place])), default=None)


def row_digits(graph: Graph, factors: Factors) -> frozenset[int]:
    """Return the digits of the rows of a batch, which replicas and micro-batches divide.  Where the axis of an input's
    rows is not known, it is the first one, or every one with as many entries as there are rows."""
    found: set[int] = set()
    for value in graph.values:
        if value.name in graph.inputs:
            alike = [axis for axis, size in enumerate(value.shape) if size == graph.rows]
            axes = alike[:1] if alike[:1] == [0] else alike
            for axis in axes if value.rows_axis is None else [value.rows_axis]:
                found.update(factors.of(value.name, axis))
    return frozenset(found)


def token_digits(calls: Sequence[Call], facts: Facts, times: Mapping[str, int]) -> tuple[int, ...]:
    """Return the digits of tokens that can be divided: axes of the other operand of products with a weight, which
    the weight does not have; those of most entries first.  times: how many ops each op stands for, if not for one."""
    found: Counter[int] = Counter()
    for call in calls:
        place = weight_place(call, facts.weights)
        if place is None or call.row.family != MATMUL or call.row.linear != "product" or call.op.name in facts.weights:
            continue
        own = set(facts.factors.flat(call.reads[place]))
        for each in facts.options[call.op.name]:
            if _cuts_all(each) and each.digit not in own:
                found[each.digit] += prod(call.shape(call.op.writes[0])) * times.get(call.op.name, 1)
    taken = facts.kept | facts.vocabulary | facts.rows
    return tuple(digit for digit, _ in found.most_common() if digit not in taken)


def require_cuts(calls: Sequence[Call], facts: Facts) -> None:
    """Raise RefusedError, naming module and line, for a model without a digit to cut, for one whose parts would not be
    equal, and for attention that draws random numbers inside of a kernel."""
    kept = facts.kept
    for call in calls:
        where = f"module {call.op.module} at {call.op.where}"
        if call.name == ATTENTION and call.op.random:
            raise RefusedError(
                "attention with dropout cannot be divided by heads",
                where=where,
                why="its kernel draws for all heads at once, and a part of them would draw other numbers",
                fix='set the dropout of attention to 0, or use attn_implementation="eager"; or tensor_parallel=1',
            )
        place = weight_place(call, facts.weights)
        if place is None or call.row.family != MATMUL:
            continue
        summed = [digit for digit in facts.factors.flat(call.reads[place]) if digit in kept]
        adding = {each.digit for each in facts.every[call.op.name] if not _cuts_all(each)}
        summed = [digit for digit in summed if digit in adding]
        if summed and not any(map(facts.divides, summed)):
            sizes = " x ".join(str(facts.factors.size(digit)) for digit in summed)
            raise RefusedError(
                f"{facts.weights[call.reads[place]]} has no {facts.shards} equal parts: it sums over {sizes} entries",
                where=where,
                why="ranks hold equal parts of attention heads and hidden axes",
                fix=WAY_OUT,
            )
    if not any(map(facts.divides, kept | facts.vocabulary)):
        raise RefusedError(
            f"nothing in the model can be divided among {facts.shards} ranks",
            why="no axis is made by one weight and summed over by a later one, with nothing between that mixes it",
            fix="use tensor_parallel=1",
        )
