"""The proof that no query sees a later key: a walk from scores to the masks that they meet.

What is looked for is what a value holds wherever the key is later than the query.  A value that depends on constants
alone is computed and looked at; above that logic decides: `a & b` is False there if a or b is.  So masks of padding and
of documents may hang on the inputs, as long as a causal one is among what they are combined with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopart.passes.tokens.context import Model, Refused, TokenOp
from autopart.passes.tokens.recipe import Guard, Lift, Mask, Shape

FALSE, TRUE, NEGATIVE, ZERO, ONE = "false", "true", "negative", "zero", "one"
VERY_NEGATIVE = -1e9
"""A bias from here on makes a probability 0 whatever the scores are, which are far smaller."""
_LOWEST = {"float16": -65504.0}
_AND, _OR = ("logical_and", "bitwise_and", "__and__"), ("logical_or", "bitwise_or", "__or__")
_NOT = ("logical_not", "bitwise_not")
_OPPOSITE = {FALSE: TRUE, TRUE: FALSE, ZERO: ONE, ONE: ZERO}
_SAME = ("clone", "contiguous", "detach", "expand", "slice", "transpose", "permute", "alias", "to")
_RESHAPED = ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
_FACTORS = ("dropout", "native_dropout", "neg", "abs", "relu", "square", "sqrt", "tanh", "sin")


class Place(NamedTuple):
    """A value and where its queries and keys lie; None where it is the same for all of them."""

    name: str
    queries: int | None
    keys: int | None


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
        self._visible: dict[tuple[Mask, ...], bool] = {}

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
            NEGATIVE: lambda x: x <= lowest(self._dtype(place.name)),
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
        if op.name in _SAME or op.name == "_to_copy":
            return self._copied(op, place, what)
        if op.name in _RESHAPED:
            moved = _through_reshape(place, op.model.shape(op.refs[0]), op.out.shape)
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
            what = {FALSE: ZERO, TRUE: ONE}.get(what, what) if self._dtype(op.refs[0]) != "bool" else what
        elif self._dtype(op.refs[0]) == "bool":
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

    def _dtype(self, name: str) -> str:
        found = self._model.values.get(name)
        return found.dtype if found is not None else self._model.params[name].dtype

    def guard(self, op: TokenOp, place: Place) -> Guard | None:
        """What must hold of the batch for a softmax over keys: None where it always does."""
        met = self._masks(place)
        if not any(finite for _, finite in met):
            return None
        masks = tuple(dict.fromkeys(mask for mask, _ in met))
        if not all(mask.value in self._model.full for mask in masks):
            raise Refused(
                "its mask depends on parameters, so that no batch can be checked for queries that see nothing"
            )
        lifts = self._lifts(op, place.name, {mask.value for mask in masks})
        if not lifts and all(mask.value in self._model.fixed for mask in masks):
            if masks not in self._visible:
                self._visible[masks] = self._all_see(masks)
            if not self._visible[masks]:
                raise Refused("some query sees no key that is not after it, and would look at all of them alike")
            return None
        return Guard(masks, op.op.name, lifts)

    def _lifts(self, op: TokenOp, scores: str, masks: Collection[str]) -> tuple[Lift, ...]:
        """What is added to scores beside their masks and could undo these: what depends on inputs.  Raises Refused for
        constants that do undo them."""
        lifts: dict[Lift, None] = {}
        for name, factor in self._addends(scores, 1.0):
            if name in masks or self._dtype(name) == "bool":
                continue
            most = -lowest(self._dtype(name)) / 10
            if name not in self._model.fixed:
                lifts[name, factor, most] = None
                continue
            found = self._model.numbers.of(name)
            if found is None or not np.all(np.nan_to_num(found, nan=math.inf) * factor <= most):
                raise Refused("what is added to its scores is so large that it may undo their mask")
        return tuple(lifts)

    def _addends(self, name: str, factor: float) -> Iterator[tuple[str, float]]:
        """What scores are sums of, as far as it depends on no parameter, and by what each is multiplied."""
        op = self._model.writer.get(name)
        if op is None or name in self._model.full:
            if name in self._model.full:
                yield name, factor
            return
        here = TokenOp(self._model, op)
        for key, times in self._added(here):
            ref = here.ref(key)
            if ref is not None:
                yield from self._addends(ref, factor * times)

    def _added(self, op: TokenOp) -> list[tuple[str, float]]:
        """The arguments that an op adds up, and by what it multiplies them."""
        name = op.name
        if name in ("add", "sub", "rsub"):
            alpha = op.arg("alpha", 1)
            other = float(alpha) if isinstance(alpha, (int, float)) else 1.0
            return [
                ("self", -other if name == "rsub" else 1.0),
                ("other", {"add": other, "sub": -other}.get(name, 1.0)),
            ]
        if name in ("baddbmm", "addmm", "addbmm"):
            beta = op.arg("beta", 1)
            return [("self", float(beta) if isinstance(beta, (int, float)) else 1.0)]
        if name in ("mul", "div"):
            return [("self", scale if name == "mul" else 1 / scale) for scale in self._scales(op) if scale]
        if name in ("where", "masked_fill", "maximum", "minimum"):
            return [("self", 1.0), ("other", 1.0)]
        return [("self", 1.0), ("input", 1.0)] if name in (*_SAME, *_RESHAPED, "_to_copy") else []

    def _scales(self, op: TokenOp) -> tuple[float, ...]:
        """What scores are multiplied with: a number, or the ends of a constant."""
        value, ref = op.arg("other"), op.ref("other")
        if isinstance(value, (int, float)):
            return (float(value),)
        found = self._model.numbers.of(ref) if ref in self._model.fixed and ref is not None else None
        return () if found is None or not found.size else (float(found.min()), float(found.max()))

    def _all_see(self, masks: Sequence[Mask]) -> bool:
        seen: np.ndarray | None = None
        for mask in masks:
            found = self._model.numbers.of(mask.value)
            if found is None:
                return False
            visible = {FALSE: found != 0, TRUE: found == 0}.get(mask.hides)
            visible = found > lowest(self._dtype(mask.value)) if visible is None else visible
            place = Place(*_names(mask))
            if seen is None:
                seen = ~_later(self._sizes(found.shape, place))
            seen = seen & _over_others(visible, place, np.all)
        return bool(np.all(np.any(seen, axis=1)))

    def _masks(self, place: Place) -> list[tuple[Mask, bool]]:
        """The masks that scores meet, and whether they are finite: what -inf hides has no part in any case."""
        op = self._model.writer.get(place.name)
        if op is None or not self.holds(place, NEGATIVE):
            return []
        if place.name in self._model.full:
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


def operand_place(name: str, operand: Sequence[str], result: Sequence[str], place: Place) -> Place:
    """Where an operand holds what its result holds at `place`."""

    def axis(number: int | None) -> int | None:
        found = "" if number is None else result[number]
        return operand.index(found) if found and found in operand else None

    return Place(name, axis(place.queries), axis(place.keys))


def lowest(dtype: str) -> float:
    """Up to which number a bias of this type hides."""
    return max(VERY_NEGATIVE, _LOWEST.get(dtype, -math.inf))


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


def _through_reshape(place: Place, before: Shape, after: Shape) -> tuple[int | None, int | None] | None:
    """The axes of queries and keys in what was reshaped; None where one of them is no axis there."""
    found: list[int | None] = []
    for axis in place[1:]:
        if axis is None or after[axis] == 1:
            found.append(None)
            continue
        ahead = math.prod(after[:axis])
        same = [b for b, size in enumerate(before) if size == after[axis] and math.prod(before[:b]) == ahead]
        if not same:
            return None
        found.append(same[0])
    return found[0], found[1]
