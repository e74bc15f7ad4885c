"""What scores meet between the product that makes them and their softmax: masks, and all else that is added to them.

A mask of finite numbers hides only beside what it is compared with.  A query from which finite masks hide all keys
looks at all of them alike, later ones too, whichever of the masks was meant to be causal; and a large number beside a
mask undoes it.  So everything on the way counts, also masks that hide no later key, as those of padding.  What depends
on parameters, the scores themselves first of all, is taken to be far smaller than what hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopart.passes.tokens.context import Model, Refused, TokenOp
from autopart.passes.tokens.places import (
    FALSE,
    NEGATIVE,
    RESHAPED,
    SAME,
    TRUE,
    Place,
    lowest,
    operand_place,
    through_reshape,
)
from autopart.passes.tokens.recipe import Lift, Mask

LARGEST_FACTOR = 1e4
"""Scores times this are still far smaller than what hides."""
_BOUNDED = ("tanh", "sigmoid", "softmax", "_softmax", "sin", "cos", "erf")
_LARGE = "what is added to its scores is so large that it may undo their mask"


class Scores:
    """What is met above one value.  hides: whether a value is very negative wherever the key is later."""

    def __init__(self, model: Model, hides: Callable[[Place], bool]) -> None:
        self._model, self._hides = model, hides
        self.masks: dict[Mask, None] = {}
        self.lifts: dict[Lift, None] = {}
        self._walked: set[tuple[Place, float]] = set()

    def walk(self, place: Place, factor: float = 1.0) -> None:
        """Up from here, of which `factor` times arrives below.  Raises Refused for what may undo masks.  O(ops)."""
        if not factor or (place, factor) in self._walked:
            return
        self._walked.add((place, factor))
        if self._constant(place.name):
            self._added(place, factor)
            return
        op = self._model.writer.get(place.name)
        if op is not None:
            self._through(TokenOp(self._model, op), place, factor)

    def _through(self, op: TokenOp, place: Place, factor: float) -> None:
        if op.name in RESHAPED:
            moved = through_reshape(place, self._model.shape(op.refs[0]), op.out.shape)
            self.walk(Place(op.refs[0], *(moved or (None, None))), factor)
            return
        names = op.letters()
        if names is None:
            if len(op.refs) == 1 and len(self._model.shape(op.refs[0])) == len(op.out.shape):
                self.walk(Place(op.refs[0], *place[1:]), factor)
            return
        at = [
            operand_place(ref, own, names.results[0], place) for ref, own in zip(op.refs, names.operands, strict=False)
        ]
        if any(letter not in names.results[0] for own in names.operands for letter in own if letter):
            beta = op.arg("beta", 1)  # a product: the scores; all else is added to them
            for number in names.added:
                self.walk(at[number], factor * (float(beta) if isinstance(beta, (int, float)) else 1.0))
        elif op.name in _STEPS:
            _STEPS[op.name](self, op, at, factor)
        elif op.name not in _BOUNDED:
            for one in at:
                self.walk(one, factor)
                self.walk(one, -factor)

    def _added(self, place: Place, factor: float, *, hides: bool = True) -> None:
        """What depends on no parameter, and is added.  hides: whether it may hide what it is added to."""
        dtype = self._model.dtype(place.name)
        if dtype == "bool":
            return
        if factor == 1.0 and hides and self._hides(place):
            self.masks[Mask(*place, NEGATIVE)] = None
            return
        least = lowest(dtype)
        lift = Lift(*place, factor, -least / 10, least if hides else -math.inf)
        if place.name in self._model.fixed:
            found = self._model.numbers.of(place.name)
            if found is None or np.any(np.nan_to_num(found, nan=math.inf * factor) * factor > lift.most):
                raise Refused(_LARGE)
            if not hides or np.all(found * factor > least):
                return
        self.lifts[lift] = None

    def _same(self, op: TokenOp, at: list[Place], factor: float) -> None:
        self.walk(at[0], factor)

    def _negated(self, op: TokenOp, at: list[Place], factor: float) -> None:
        self.walk(at[0], -factor)

    def _sum(self, op: TokenOp, at: list[Place], factor: float) -> None:
        alpha = op.arg("alpha", 1)
        times = float(alpha) if isinstance(alpha, (int, float)) else 1.0
        signs = {"add": (1.0, times), "sub": (1.0, -times), "rsub": (-times, 1.0)}[op.name]
        for key, sign in zip(("self", "other"), signs, strict=True):
            value = op.arg(key)
            if isinstance(value, (int, float)) and value * sign * factor > -lowest(op.out.dtype) / 10:
                raise Refused(_LARGE)
            self._walk_argument(op, key, at, factor * sign)

    def _product(self, op: TokenOp, at: list[Place], factor: float) -> None:
        keys = ("self", "other")
        for key, other in (keys, keys[::-1]) if op.name == "mul" else (keys,):
            ref = op.ref(key)
            if ref is not None and not self._constant(ref):
                for scale in self._scales(op, other):
                    self._walk_argument(op, key, at, factor * scale)

    def _scales(self, op: TokenOp, key: str) -> tuple[float, ...]:
        """What scores are multiplied with: a number, the ends of a constant, and 1 for what depends on parameters."""
        value, ref, inverted = op.arg(key), op.ref(key), op.name == "div"
        if ref is not None and ref in self._model.fixed:
            found = self._model.numbers.of(ref)
            ends = (math.inf,) if found is None or not found.size else (float(found.min()), float(found.max()))
        elif ref is not None and ref in self._model.full:
            if inverted:
                raise Refused("its scores are divided by what depends on the batch")
            for sign in (1.0, -1.0):
                self.lifts[Lift(ref, None, None, sign, LARGEST_FACTOR, -math.inf)] = None
            ends = (1.0,)
        else:
            ends = (float(value),) if isinstance(value, (int, float)) else (1.0,)
        scales = tuple(1 / end if end else math.inf for end in ends) if inverted else ends
        if any(not abs(scale) <= LARGEST_FACTOR for scale in scales):
            raise Refused("its scores are multiplied by so large a number that they may undo their mask")
        return tuple(dict.fromkeys(scales))

    def _filled(self, op: TokenOp, at: list[Place], factor: float) -> None:
        """Of what is filled in the condition is a mask, where that is very negative."""
        if op.name == "masked_fill":
            self.walk(at[0], factor)
            self._fill(op, "value", Mask(*at[1], TRUE), at, factor)
        else:
            self._fill(op, "self", Mask(*at[0], TRUE), at, factor)
            self._fill(op, "other", Mask(*at[0], FALSE), at, factor)

    def _fill(self, op: TokenOp, key: str, mask: Mask, at: list[Place], factor: float) -> None:
        value, ref, least = op.arg(key), op.ref(key), lowest(op.out.dtype)
        if ref is not None:
            found = self._model.numbers.of(ref) if ref in self._model.fixed else None
            if found is None or not found.size or not np.all(found * factor <= least):
                self._walk_argument(op, key, at, factor)
                return
            value = float(found.max())
        if isinstance(value, (int, float)):
            if value * factor > -least / 10:
                raise Refused(_LARGE)
            if value * factor <= least:
                self.masks[mask] = None

    def _largest(self, op: TokenOp, at: list[Place], factor: float) -> None:
        """What is less than scores has no part."""
        for one in at:
            if self._constant(one.name):
                self._added(one, factor, hides=False)
            else:
                self.walk(one, factor)

    def _all(self, op: TokenOp, at: list[Place], factor: float) -> None:
        for one in at:
            self.walk(one, factor)

    def _walk_argument(self, op: TokenOp, key: str, at: list[Place], factor: float) -> None:
        ref = op.ref(key)
        if ref is not None:
            self.walk(at[op.refs.index(ref)], factor)

    def _constant(self, name: str) -> bool:
        """Whether it depends on no parameter."""
        return name in self._model.full or name in self._model.fixed


_STEPS: dict[str, Callable[[Scores, TokenOp, list[Place], float], None]] = {
    **dict.fromkeys((*SAME, "_to_copy", "dropout", "native_dropout", "clamp", "clamp_min"), Scores._same),
    **dict.fromkeys(("add", "sub", "rsub"), Scores._sum),
    **dict.fromkeys(("mul", "div"), Scores._product),
    **dict.fromkeys(("where", "masked_fill"), Scores._filled),
    "neg": Scores._negated,
    "maximum": Scores._largest,
    "minimum": Scores._all,
}
