"""The proof that no query sees a later key: a walk from scores to the masks that they meet.

What is looked for is what a value holds wherever the key is later than the query.  A value that depends on constants
alone is computed and looked at; above that logic decides: `a & b` is False there if a or b is.  So masks of padding and
of documents may hang on the inputs, as long as a causal one is among what they are combined with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopart.passes.tokens.context import Model, Refused, TokenOp
from autopart.passes.tokens.places import (
    FALSE,
    NEGATIVE,
    ONE,
    RESHAPED,
    SAME,
    TRUE,
    ZERO,
    Place,
    lowest,
    operand_place,
    through_reshape,
)
from autopart.passes.tokens.recipe import Guard, Lift, Mask, Shape
from autopart.passes.tokens.scores import Scores

_AND, _OR = ("logical_and", "bitwise_and", "__and__"), ("logical_or", "bitwise_or", "__or__")
_NOT = ("logical_not", "bitwise_not")
_OPPOSITE = {FALSE: TRUE, TRUE: FALSE, ZERO: ONE, ONE: ZERO}
_FACTORS = ("dropout", "native_dropout", "neg", "abs", "relu", "square", "sqrt", "tanh", "sin")


class Causality:
    """Of one model.  What was found is kept, so that layers that share a mask ask once.

    reach: where that is given, the question is not about later keys, but about those that are more tokens before the
    query.  asked: what ops relied on.  seen: constants that hid what was asked for.
    """

    def __init__(self, model: Model, reach: int | None = None) -> None:
        self._model, self.reach = model, reach
        self.asked: dict[str, list[tuple[Place, str]]] = {}
        self.seen: dict[tuple[Place, str], None] = {}
        self._known: dict[tuple[Place, str], bool] = {}
        self._visible: dict[tuple[tuple[Mask, ...], tuple[Lift, ...]], bool] = {}

    def relies(self, op: TokenOp, place: Place, what: str) -> bool:
        """`holds`, noted as what lets an op take all keys at once."""
        self.asked.setdefault(op.op.name, []).append((place, what))
        return self.holds(place, what)

    def furthest(self, place: Place, what: str) -> int | None:
        """How many tokens before the query a key is at most that constants do not hide; None where they hide none."""
        there = self._there(place, what)
        if there is None:
            return None
        queries, keys = np.nonzero(~there)
        return max(0, int((queries - keys).max(initial=0)))

    def covers(self, place: Place, proof: Causality) -> bool:
        """Whether one of the masks that hide what is later proves what `proof` asks for as well: that queries see some
        key is known of these (`guard`), not of what others hide."""
        try:
            met = self._masks(place)
        except Refused:
            return False
        return any(proof.holds(Place(*_names(mask)), mask.hides) for mask, _ in met)

    def holds(self, place: Place, what: str) -> bool:
        """Whether a value is `what` wherever the key is later than the query."""
        key = place, what
        if key not in self._known:
            self._known[key] = False  # for a walk that comes back, which no graph has
            self._known[key] = self._holds(place, what)
        return self._known[key]

    def _holds(self, place: Place, what: str) -> bool:
        if place.name in self._model.fixed:
            return self._numbers_hold(place, what)
        op = self._model.writer.get(place.name)
        return op is not None and self._op_holds(TokenOp(self._model, op), place, what)

    def _numbers_hold(self, place: Place, what: str) -> bool:
        there = self._there(place, what)
        if there is None:
            return False
        asked = _later(there.shape) if self.reach is None else _older(there.shape, self.reach)
        if not np.all(there | ~asked):
            return False
        self.seen[place, what] = None
        return True

    def _there(self, place: Place, what: str) -> np.ndarray | None:
        """Where a constant is `what`: (queries, keys)."""
        found = self._model.numbers.of(place.name)
        if found is None or any(axis is not None and found.shape[axis] > self._model.tokens for axis in place[1:]):
            return None
        there = {
            FALSE: lambda x: x == 0,
            TRUE: lambda x: x != 0,
            NEGATIVE: lambda x: x <= lowest(self._model.dtype(place.name)),
            ZERO: lambda x: x == 0,
            ONE: lambda x: x == 1,
        }[what](found)
        return np.broadcast_to(_over_others(there, place, np.all), self._sizes(found.shape, place))

    def _sizes(self, shape: Shape, place: Place) -> tuple[int, int]:
        """Queries and keys of a value: all tokens, where it is the same for all of them, or those but the last ones."""
        sizes = [shape[axis] if axis is not None and shape[axis] > 1 else self._model.tokens for axis in place[1:]]
        return sizes[0], sizes[1]

    def _op_holds(self, op: TokenOp, place: Place, what: str) -> bool:
        if op.name in (*_AND, *_OR):
            every = (op.name in _OR) == (what in (FALSE, ZERO))
            return _combined(every, [self._operand(op, i, place, what) for i in range(len(op.refs))])
        if op.name in _NOT:
            return what in _OPPOSITE and self._operand(op, 0, place, _OPPOSITE[what])
        if op.name in SAME or op.name == "_to_copy":
            return self._copied(op, place, what)
        if op.name in RESHAPED:
            moved = through_reshape(place, op.model.shape(op.refs[0]), op.out.shape)
            return moved is not None and self.holds(Place(op.refs[0], *moved), what)
        if op.name == "where":
            return self._where(op, place, what)
        if op.name == "masked_fill":
            filled = self._operand(op, 1, place, TRUE)
            return (filled or self._operand(op, 0, place, what)) and self._is(op, "value", place, what)
        if what == NEGATIVE:
            return self._negative(op, place)
        return what in (ZERO, ONE) and self._zero(op, place, what)

    def _copied(self, op: TokenOp, place: Place, what: str) -> bool:
        before, after = op.model.shape(op.refs[0]), op.out.shape
        if op.name == "slice" and before != after:
            return False
        if op.out.dtype == "bool" or what in (FALSE, TRUE):
            what = {FALSE: ZERO, TRUE: ONE}.get(what, what) if self._model.dtype(op.refs[0]) != "bool" else what
        elif self._model.dtype(op.refs[0]) == "bool":
            what = {ZERO: FALSE, ONE: TRUE}.get(what, what)
        return self._operand(op, 0, place, what)

    def _where(self, op: TokenOp, place: Place, what: str) -> bool:
        chosen, rest = self._is(op, "self", place, what), self._is(op, "other", place, what)
        if chosen and rest:
            return True
        if chosen:
            return self._operand(op, 0, place, TRUE)
        return rest and self._operand(op, 0, place, FALSE)

    def _negative(self, op: TokenOp, place: Place) -> bool:
        if op.name == "add":
            return op.arg("alpha", 1) == 1 and any(self._is(op, key, place, NEGATIVE) for key in ("self", "other"))
        if op.name == "minimum":
            return any(self._is(op, key, place, NEGATIVE) for key in ("self", "other"))
        if op.name in ("mul", "sub", "rsub", "div", "maximum"):
            return self._negative_product(op, place)
        return False

    def _negative_product(self, op: TokenOp, place: Place) -> bool:
        """(1 - mask) * -inf: 1 where it hides, times a number that is very negative."""
        sides = [(key, other) for key, other in (("self", "other"), ("other", "self"))]
        if op.name == "mul":
            return any(self._is(op, a, place, ONE) and self._is(op, b, place, NEGATIVE) for a, b in sides)
        return op.name == "maximum" and all(self._is(op, a, place, NEGATIVE) for a, _ in sides)

    def _zero(self, op: TokenOp, place: Place, what: str) -> bool:
        if op.name in ("sub", "rsub"):  # 1 - mask
            first, second = ("self", "other") if op.name == "sub" else ("other", "self")
            return self._is(op, first, place, ONE) and self._is(op, second, place, _OPPOSITE[what])
        if what == ONE:
            return op.name == "mul" and all(self._is(op, key, place, ONE) for key in ("self", "other"))
        if op.name in ("mul", "div"):
            keys = ("self", "other") if op.name == "mul" else ("self",)
            return any(self._is(op, key, place, ZERO) for key in keys)
        if op.name in ("softmax", "_softmax", "_safe_softmax"):
            along = op.axis("dim", len(op.out.shape), -1)
            return along == place.keys and self._operand(op, 0, place, NEGATIVE)
        if op.name == "tril" and self.reach is None:
            last = len(op.out.shape) - 1
            return (place.queries, place.keys) == (last - 1, last) and op.number("diagonal", 0) <= 0
        return op.name in _FACTORS and self._operand(op, 0, place, ZERO)

    def _is(self, op: TokenOp, key: str, place: Place, what: str) -> bool:
        """`holds` of an argument that may be a number."""
        value = op.arg(key)
        if isinstance(value, (int, float)):
            limit = lowest(op.out.dtype)
            return bool(
                {ZERO: value == 0, FALSE: value == 0, ONE: value == 1, NEGATIVE: value <= limit}.get(what, value)
            )
        ref = op.ref(key)
        return ref is not None and self._operand(op, op.refs.index(ref), place, what)

    def _operand(self, op: TokenOp, number: int, place: Place, what: str) -> bool:
        names = op.letters()
        if names is None or number >= len(names.operands):
            return False
        return self.holds(operand_place(op.refs[number], names.operands[number], names.results[0], place), what)

    def guard(self, op: TokenOp, place: Place) -> Guard | None:
        """What must hold of the batch for a softmax over keys: None where it always does."""
        met = self._masks(place)
        if not any(finite for _, finite in met):
            return None
        found = Scores(self._model, lambda at: self.holds(at, NEGATIVE))
        found.walk(place)
        masks, lifts = tuple(dict.fromkeys([*(mask for mask, _ in met), *found.masks])), tuple(found.lifts)
        known = self._model.full | self._model.fixed
        if not all(mask.value in known for mask in masks):
            raise Refused(
                "its mask depends on parameters, so that no batch can be checked for queries that see nothing"
            )
        if self._model.fixed.issuperset([*(mask.value for mask in masks), *(lift.value for lift in lifts)]):
            if (masks, lifts) not in self._visible:
                self._visible[masks, lifts] = self._all_see(masks, lifts)
            if not self._visible[masks, lifts]:
                raise Refused("some query sees no key that is not after it, and would look at all of them alike")
            return None
        return Guard(masks, op.op.name, lifts)

    def _all_see(self, masks: Sequence[Mask], lifts: Sequence[Lift]) -> bool:
        shown: list[tuple[Place, np.ndarray]] = []
        for mask in masks:
            found = self._model.numbers.of(mask.value)
            if found is None:
                return False
            finite = found > lowest(self._model.dtype(mask.value))
            shown.append((Place(*_names(mask)), {FALSE: found != 0, TRUE: found == 0}.get(mask.hides, finite)))
        for lift in lifts:
            found = self._model.numbers.of(lift.value)
            assert found is not None  # it was looked at
            shown.append((Place(lift.value, lift.queries, lift.keys), found * lift.factor > lift.least))
        seen = ~_later(self._sizes(shown[0][1].shape, shown[0][0]))
        for place, cells in shown:
            seen = seen & _over_others(cells, place, np.all)
        return bool(np.all(np.any(seen, axis=1)))

    def _masks(self, place: Place) -> list[tuple[Mask, bool]]:
        """The masks that scores meet, and whether they are finite: what -inf hides has no part in any case."""
        if not self.holds(place, NEGATIVE):
            return []
        op = self._model.writer.get(place.name)
        if op is None or place.name in self._model.full:
            return [(Mask(*place, NEGATIVE), True)]
        here = TokenOp(self._model, op)
        names = here.letters()
        if names is None or here.name not in (*_MASKING, *_CARRIED):
            raise Refused("how it is masked cannot be followed")

        def at(number: int) -> Place:
            return operand_place(here.refs[number], names.operands[number], names.results[0], place)

        if here.name not in _MASKING:
            return [mask for number in range(len(here.refs)) for mask in self._rest(at(number))]
        filled, hides, condition = self._filled(here, place)
        scores = next((n for n, ref in enumerate(here.refs) if n != condition and ref != here.ref(filled)), None)
        rest = [] if scores is None else self._rest(at(scores))
        return [*rest, (Mask(*at(condition), hides), here.arg(filled) != -math.inf)]

    def _filled(self, op: TokenOp, place: Place) -> tuple[str, str, int]:
        """Of an op that masks: the argument that is very negative, how the condition hides, and its number."""
        if op.name == "masked_fill":
            return "value", TRUE, 1
        return ("other", FALSE, 0) if self._is(op, "other", place, NEGATIVE) else ("self", TRUE, 0)

    def _rest(self, place: Place) -> list[tuple[Mask, bool]]:
        return self._masks(place) if place.keys is not None else []


_MASKING, _CARRIED = ("where", "masked_fill"), ("add", "_to_copy", "clone", "detach", "expand", "contiguous")


def _names(mask: Mask) -> tuple[str, int | None, int | None]:
    return mask.value, mask.queries, mask.keys


def _later(sizes: tuple[int, ...]) -> np.ndarray:
    """Where the key is later than the query."""
    return np.triu(np.ones(sizes, dtype=bool), 1)


def _older(sizes: tuple[int, ...], reach: int) -> np.ndarray:
    """Where the key is more than so many tokens before the query."""
    return np.tril(np.ones(sizes, dtype=bool), -reach - 1)


def _over_others(found: np.ndarray, place: Place, reduce: object) -> np.ndarray:
    """(queries, keys) of an array, reduced over its other axes."""
    assert callable(reduce)
    others = tuple(axis for axis in range(found.ndim) if axis not in place[1:])
    kept = reduce(found, axis=others) if others else found
    if place.queries is not None and place.keys is not None:
        return kept if place.queries < place.keys else kept.T
    if place.queries is not None:
        return np.asarray(kept).reshape(-1, 1)
    return np.asarray(kept).reshape(1, -1)


def _combined(every: bool, found: Sequence[bool]) -> bool:
    return all(found) if every else any(found)
