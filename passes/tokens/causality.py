"""The proof that no query sees a later key: a walk from scores up to their masks.

The question is what a value is wherever the key is later than the query.  A value that depends on constants alone is
computed and looked at; above that logic decides: `a & b` is False where a or b is.  So masks of padding and documents
may depend on the inputs, as long as one of the masks that they are combined with is causal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopart.passes.tokens.context import Model, Refused, TokenOp
from autopart.passes.tokens.recipe import (
    FALSE,
    MINUS_INF,
    NEGATIVE,
    ONE,
    TRUE,
    ZERO,
    Claim,
    MaskGuard,
    OpRecipe,
    QueryKeyAxes,
    Shape,
)
from autopart.passes.tokens.scores import RESHAPED, SAME, ScoreTerms, hiding_limit, of_operand, of_reshaped

_AND, _OR = ("logical_and", "bitwise_and", "__and__"), ("logical_or", "bitwise_or", "__or__")
_OPPOSITE = {FALSE: TRUE, TRUE: FALSE, ZERO: ONE, ONE: ZERO}
_SUFFICES: dict[tuple[str, str], Sequence[Sequence[tuple[str, str]]]] = {
    ("sub", MINUS_INF): [[("self", MINUS_INF)]],  # of a softmax that is written out: -inf minus the largest score
    ("sub", ZERO): [[("self", ONE), ("other", ONE)]],
    ("sub", ONE): [[("self", ONE), ("other", ZERO)]],
    ("rsub", ZERO): [[("other", ONE), ("self", ONE)]],  # 1 - mask
    ("rsub", ONE): [[("other", ONE), ("self", ZERO)]],
    ("mul", ONE): [[("self", ONE), ("other", ONE)]],
    ("mul", ZERO): [[("self", ZERO)], [("other", ZERO)]],
    ("div", ZERO): [[("self", ZERO)]],
    ("exp", ZERO): [[("self", MINUS_INF)]],
    **{(name, w): [[("self", o)]] for w, o in _OPPOSITE.items() for name in ("logical_not", "bitwise_not")},
}
"""(op, what its result is claimed to be) -> ways to show that: arguments that have to be something, all of one way."""
for _what in (NEGATIVE, MINUS_INF):
    _SUFFICES |= {
        **{(name, _what): [[("self", _what)], [("other", _what)]] for name in ("minimum", "add")},
        ("maximum", _what): [[("self", _what), ("other", _what)]],
        ("mul", _what): [[("self", ONE), ("other", _what)], [("other", ONE), ("self", _what)]],  # (1 - mask) * -inf
    }
for _what in (*_OPPOSITE, NEGATIVE, MINUS_INF):
    _chosen, _rest = ("self", _what), ("other", _what)
    _SUFFICES |= {
        ("where", _what): [[_chosen, _rest], [_chosen, ("condition", TRUE)], [_rest, ("condition", FALSE)]],
        ("masked_fill", _what): [[("value", _what), ("mask", TRUE)], [("value", _what), ("self", _what)]],
    }
_FACTORS = ("dropout", "native_dropout", "neg", "abs", "relu", "square", "sqrt", "tanh", "sin")
_ADVICE = (
    "combine the mask with a causal one by &, torch.where or masked_fill, with -inf or the least number of its type"
)


class Causality:
    """Proves claims about one model; layers that share a mask share the answer.

    reach: where it is given, claims are not about later keys, but about keys more than `reach` tokens before the query.
    checks: of the scores that have to be checked in each batch, each once.
    """

    def __init__(self, model: Model, reach: int | None = None) -> None:
        self._model, self.reach = model, reach
        self.checks: dict[tuple[object, ...], MaskGuard] = {}
        self._ages: set[int] = set()  # in tokens, of the oldest keys that constants show to a query
        self._known: dict[Claim, bool] = {}
        self._visible: dict[tuple[object, ...], bool] = {}

    def proven(self, op: str, recipe: OpRecipe) -> tuple[Claim, ...]:
        """The first of the claims of a recipe that holds, if it relies on any; what has to be checked of each batch is
        added to `checks`.  Raises Refused where none holds."""
        if not recipe.relies_on:
            return ()
        claim = next((claim for claim in recipe.relies_on if self.holds(*claim)), None)
        if claim is None:
            raise Refused("it combines tokens with each other, and is not proven to hide every later token", _ADVICE)
        if claim[1] == NEGATIVE and not self.holds(claim[0], MINUS_INF):
            self._check(op, claim[0])
        return (claim,)

    def reach_of(self, claims: Sequence[Claim]) -> int | None:
        """The number of tokens before a query that it sees at most, where all claims hide older keys too; else None.

        Where -inf hides later keys, no batch is checked for queries that see nothing: -inf must hide older keys too.
        """
        certain = {at for at, what in claims if what == NEGATIVE and self.holds(at, MINUS_INF)}
        for window in self._windows if claims else ():
            if all(window.holds(at, MINUS_INF if at in certain else what) for at, what in claims):
                return window.reach
        return None

    @cached_property
    def _windows(self) -> list[Causality]:
        """Proofs about keys older than those that constants show, the shortest reach first."""
        return [Causality(self._model, age) for age in sorted(self._ages) if age < self._model.tokens - 1]

    def holds(self, at: QueryKeyAxes, what: str) -> bool:
        """Whether a value is `what` wherever the key is later than the query."""
        claim = at, what
        if claim not in self._known:
            op = self._model.writer.get(at.value)
            if at.value in self._model.fixed:
                self._known[claim] = self._numbers_hold(at, what)
            else:
                self._known[claim] = op is not None and self._op_holds(TokenOp(self._model, op), at, what)
        return self._known[claim]

    def _numbers_hold(self, at: QueryKeyAxes, what: str) -> bool:
        there = self._there(at, what)
        if there is None:
            return False
        cells = np.ones(there.shape, dtype=bool)
        asked = np.triu(cells, 1) if self.reach is None else np.tril(cells, -self.reach - 1)
        if not np.all(there | ~asked):
            return False
        if self.reach is None:
            queries, keys = np.nonzero(~there)
            self._ages.add(int((queries - keys).max(initial=0)))
        return True

    def _there(self, at: QueryKeyAxes, what: str) -> np.ndarray | None:
        """Where a constant is `what`: (queries, keys)."""
        found = self._model.numbers.of(at.value)
        if found is None or any(axis is not None and found.shape[axis] > self._model.tokens for axis in at[1:]):
            return None
        there = {
            FALSE: lambda x: x == 0,
            TRUE: lambda x: x != 0,
            NEGATIVE: lambda x: x <= hiding_limit(self._model.dtype(at.value)),
            MINUS_INF: lambda x: x == -math.inf,
            ZERO: lambda x: x == 0,
            ONE: lambda x: x == 1,
        }[what](found)
        return np.broadcast_to(_over_others(there, at), self._sizes(found.shape, at))

    def _sizes(self, shape: Shape, at: QueryKeyAxes) -> tuple[int, int]:
        """Queries and keys of a value: all tokens where it is the same for all of them; some values lack the last."""
        sizes = [shape[axis] if axis is not None and shape[axis] > 1 else self._model.tokens for axis in at[1:]]
        return sizes[0], sizes[1]

    def _op_holds(self, op: TokenOp, at: QueryKeyAxes, what: str) -> bool:
        if op.name in (*_AND, *_OR):
            every = (op.name in _OR) == (what in (FALSE, ZERO))
            found = [self._operand(op, number, at, what) for number in range(len(op.refs))]
            return all(found) if every else any(found)
        if op.name in SAME or op.name == "_to_copy":
            return self._copied(op, at, what)
        if op.name in RESHAPED:
            moved = of_reshaped(op.refs[0], op.shapes[0], op.shape, at)
            return moved is not None and self.holds(moved, what)
        if op.name == "add" and op.arg("alpha", 1) != 1:
            return False
        if (op.name, what) in _SUFFICES:
            ways = _SUFFICES[op.name, what]
            return any(all(self._is(op, key, at, wanted) for key, wanted in way) for way in ways)
        return what == ZERO and self._zero(op, at)

    def _copied(self, op: TokenOp, at: QueryKeyAxes, what: str) -> bool:
        if op.name == "slice" and op.shapes[0] != op.shape:
            return False
        before = self._model.dtype(op.refs[0])
        if op.dtype == "bool" or what in (FALSE, TRUE):
            what = {FALSE: ZERO, TRUE: ONE}.get(what, what) if before != "bool" else what
        elif before == "bool":
            what = {ZERO: FALSE, ONE: TRUE}.get(what, what)
        return self._operand(op, 0, at, what)

    def _zero(self, op: TokenOp, at: QueryKeyAxes) -> bool:
        if op.name in ("softmax", "_softmax", "_safe_softmax"):
            along = op.axis("dim", len(op.shape), -1)
            return along == at.keys and self._operand(op, 0, at, NEGATIVE)
        if op.name == "tril" and self.reach is None:
            last = len(op.shape) - 1
            return (at.queries, at.keys) == (last - 1, last) and op.number("diagonal", 0) <= 0
        return op.name in _FACTORS and self._operand(op, 0, at, ZERO)

    def _is(self, op: TokenOp, key: str, at: QueryKeyAxes, what: str) -> bool:
        """`holds` of an argument that may be a number."""
        value = op.arg(key)
        if isinstance(value, (int, float)):
            limits = {NEGATIVE: hiding_limit(op.dtype), MINUS_INF: -math.inf}
            if what in limits:
                return value <= limits[what]
            return bool({ZERO: value == 0, FALSE: value == 0, ONE: value == 1}.get(what, value))
        ref = op.ref(key)
        return ref is not None and self._operand(op, op.refs.index(ref), at, what)

    def _operand(self, op: TokenOp, number: int, at: QueryKeyAxes, what: str) -> bool:
        names = op.letters()
        if names is None or number >= len(names.operands):
            return False
        return self.holds(of_operand(op.refs[number], names.operands[number], names.results[0], at), what)

    def _check(self, op: str, at: QueryKeyAxes) -> None:
        """Add what must hold of each batch for a softmax over keys, unless constants show that it always does."""
        terms = ScoreTerms(self._model, lambda term: self.holds(term, NEGATIVE))
        terms.walk(at)
        known, names = self._model.full | self._model.fixed, {mask.value for mask, _ in terms.masks}
        if not names:
            raise Refused("the masks of its scores cannot be followed")
        if not known.issuperset(names):
            raise Refused(
                "its mask depends on parameters, so that no batch can be checked for queries that see nothing"
            )
        key = tuple(terms.masks), tuple(terms.lifts)
        if not self._model.fixed.issuperset(names.union(term.value for term, *_ in terms.lifts)):
            self.checks.setdefault(key, MaskGuard(op, *key))
            return
        if key not in self._visible:
            self._visible[key] = self._all_see(terms)
        if not self._visible[key]:
            raise Refused("some query sees no key that is not after it, and would look at all of them alike")

    def _all_see(self, terms: ScoreTerms) -> bool:
        """Whether every query sees a key that is not later through masks that are constants."""
        shown: list[tuple[QueryKeyAxes, np.ndarray]] = []
        for at, hides in terms.masks:
            found = self._model.numbers.of(at.value)
            if found is None:
                return False
            limit = hiding_limit(self._model.dtype(at.value))
            shown.append((at, found > limit if hides == NEGATIVE else (found != 0) == (hides == FALSE)))
        for at, factor, _, least in terms.lifts:
            found = self._model.numbers.of(at.value)
            assert found is not None  # it was looked at
            shown.append((at, found * factor > least))
        seen = np.tril(np.ones(self._sizes(shown[0][1].shape, shown[0][0]), dtype=bool))
        for at, cells in shown:
            seen = seen & _over_others(cells, at)
        return bool(np.all(np.any(seen, axis=1)))


def _over_others(found: np.ndarray, at: QueryKeyAxes) -> np.ndarray:
    """(queries, keys) of an array of booleans: True where it is True for every place along its other axes."""
    kept = np.asarray(np.all(found, axis=tuple(axis for axis in range(found.ndim) if axis not in at[1:])))
    if at.queries is not None and at.keys is not None:
        return kept if at.queries < at.keys else kept.T
    return kept.reshape(-1, 1) if at.queries is not None else kept.reshape(1, -1)
