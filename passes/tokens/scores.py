"""What is added to attention scores between their product and their softmax: masks and everything else.

A mask of finite numbers hides a key only beside a visible one.  A query whose keys are all hidden by finite masks looks
at all of them alike, later ones too, whichever of the masks was meant to be causal; and a large number beside a mask
undoes it.  So everything on the way counts, also masks that hide no later key, such as those of padding.  What depends
on parameters, first of all the scores themselves, is taken to be far smaller than what hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopart.passes.tokens.context import Model, Refused, TokenOp
from autopart.passes.tokens.recipe import FALSE, NEGATIVE, TRUE, QueryKeyAxes, Shape

VERY_NEGATIVE = -1e9
"""A bias of at most this makes a probability 0 beside any score."""
LARGEST_FACTOR = 1e4
"""Scores times this are still far smaller than what hides."""
SAME = ("clone", "contiguous", "detach", "expand", "slice", "transpose", "permute", "alias", "to")
RESHAPED = ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
_LOWEST = {"float16": -65504.0}
_RISING = (*SAME, "_to_copy", "dropout", "native_dropout", "clamp", "clamp_min", "minimum")
_BOUNDED = ("tanh", "sigmoid", "softmax", "_softmax", "sin", "cos", "erf")
_LARGE = "what is added to its scores is so large that it may undo their mask"


def hiding_limit(dtype: str) -> float:
    """The largest number of this type that hides a key."""
    return max(VERY_NEGATIVE, _LOWEST.get(dtype, -math.inf))


def of_operand(name: str, operand: Sequence[str], result: Sequence[str], axes: QueryKeyAxes) -> QueryKeyAxes:
    """The axes of an operand from those of its result.  operand, result: names of all axes."""

    def axis(number: int | None) -> int | None:
        found = "" if number is None else result[number]
        return operand.index(found) if found and found in operand else None

    return QueryKeyAxes(name, axis(axes.queries), axis(axes.keys))


def of_reshaped(name: str, before: Shape, after: Shape, axes: QueryKeyAxes) -> QueryKeyAxes | None:
    """The axes of what was reshaped from those of the result; None where one of them was made by the reshape."""
    found: list[int | None] = []
    for axis in axes[1:]:
        if axis is None or after[axis] == 1:
            found.append(None)
            continue
        ahead = math.prod(after[:axis])
        same = [b for b, size in enumerate(before) if size == after[axis] and math.prod(before[:b]) == ahead]
        if not same:
            return None
        found.append(same[0])
    return QueryKeyAxes(name, *found)


class ScoreTerms:
    """Collects what is added to scores, from their softmax upwards.  masks, lifts: see `MaskGuard`, as ordered sets."""

    def __init__(self, model: Model, hides: Callable[[QueryKeyAxes], bool]) -> None:
        """hides: whether a value is NEGATIVE wherever the key is later."""
        self._model, self._hides = model, hides
        self.masks: dict[tuple[QueryKeyAxes, str], None] = {}
        self.lifts: dict[tuple[QueryKeyAxes, float, float, float], None] = {}
        self._walked: set[tuple[QueryKeyAxes, float]] = set()

    def walk(self, at: QueryKeyAxes, factor: float = 1.0) -> None:
        """Collect the terms of a value, which is multiplied by `factor` on its way to the scores.

        Raises Refused for what may undo masks.  O(ops).
        """
        if not factor or (at, factor) in self._walked:
            return
        self._walked.add((at, factor))
        if self._constant(at.value):
            self._added(at, factor)
            return
        op = self._model.writer.get(at.value)
        if op is not None:
            self._through(TokenOp(self._model, op), at, factor)

    def _through(self, op: TokenOp, at: QueryKeyAxes, factor: float) -> None:
        if op.name in RESHAPED:
            self.walk(
                of_reshaped(op.refs[0], op.shapes[0], op.shape, at) or QueryKeyAxes(op.refs[0], None, None), factor
            )
            return
        names = op.letters()
        if names is None:
            if len(op.refs) == 1 and len(op.shapes[0]) == len(op.shape):
                self.walk(at._replace(value=op.refs[0]), factor)
            return
        every = [of_operand(ref, own, names.results[0], at) for ref, own in zip(op.refs, names.operands, strict=False)]
        if any(letter not in names.results[0] for own in names.operands for letter in own if letter):
            beta = op.arg("beta", 1)  # a product: the scores; all else is added to them
            for number in names.added:
                self.walk(every[number], factor * (float(beta) if isinstance(beta, (int, float)) else 1.0))
        else:
            self._on(op, every, factor)

    def _on(self, op: TokenOp, every: list[QueryKeyAxes], factor: float) -> None:
        match op.name:
            case "add" | "sub" | "rsub":
                self._sum(op, every, factor)
            case "mul" | "div":
                self._product(op, every, factor)
            case "masked_fill":  # the condition is a mask where what is filled in hides
                self.walk(every[0], factor)
                self._fill(op, "value", (every[1], TRUE), every, factor)
            case "where":
                self._fill(op, "self", (every[0], TRUE), every, factor)
                self._fill(op, "other", (every[0], FALSE), every, factor)
            case "neg":
                self.walk(every[0], -factor)
            case "maximum":  # a constant below the scores does not count
                for one in every:
                    if self._constant(one.value):
                        self._added(one, factor, hides=False)
                    else:
                        self.walk(one, factor)
            case name if name not in _BOUNDED:
                for one in every:
                    self.walk(one, factor)
                    if name not in _RISING:
                        self.walk(one, -factor)

    def _added(self, at: QueryKeyAxes, factor: float, *, hides: bool = True) -> None:
        """Collect a term that depends on no parameter.  hides: whether it may hide what it is added to."""
        dtype = self._model.dtype(at.value)
        if dtype == "bool":
            return
        if factor == 1.0 and hides and self._hides(at):
            self.masks[at, NEGATIVE] = None
            return
        limit = hiding_limit(dtype)
        most, least = -limit / 10, limit if hides else -math.inf
        if at.value in self._model.fixed:
            found = self._model.numbers.of(at.value)
            if found is None or np.any(np.nan_to_num(found, nan=math.inf * factor) * factor > most):
                raise Refused(_LARGE)
            if not hides or np.all(found * factor > limit):
                return
        self.lifts[at, factor, most, least] = None

    def _sum(self, op: TokenOp, every: list[QueryKeyAxes], factor: float) -> None:
        alpha = op.arg("alpha", 1)
        times = float(alpha) if isinstance(alpha, (int, float)) else 1.0
        signs = {"add": (1.0, times), "sub": (1.0, -times), "rsub": (-times, 1.0)}[op.name]
        for key, sign in zip(("self", "other"), signs, strict=True):
            value = op.arg(key)
            if isinstance(value, (int, float)) and value * sign * factor > -hiding_limit(op.dtype) / 10:
                raise Refused(_LARGE)
            self._walk_argument(op, key, every, factor * sign)

    def _product(self, op: TokenOp, every: list[QueryKeyAxes], factor: float) -> None:
        keys = ("self", "other")
        for key, other in (keys, keys[::-1]) if op.name == "mul" else (keys,):
            ref = op.ref(key)
            if ref is not None and not self._constant(ref):
                for scale in self._scales(op, other):
                    self._walk_argument(op, key, every, factor * scale)

    def _scales(self, op: TokenOp, key: str) -> tuple[float, ...]:
        """What scores are multiplied with: a number, the ends of a constant, and 1 for what depends on parameters."""
        value, ref, inverted = op.arg(key), op.ref(key), op.name == "div"
        if ref is not None and ref in self._model.fixed:
            found = self._model.numbers.of(ref)
            ends = (math.inf,) if found is None or not found.size else (float(found.min()), float(found.max()))
        elif ref is not None and ref in self._model.full:
            if inverted:
                raise Refused("its scores are divided by a value that depends on the batch")
            for sign in (1.0, -1.0):
                self.lifts[QueryKeyAxes(ref, None, None), sign, LARGEST_FACTOR, -math.inf] = None
            ends = (1.0,)
        else:
            ends = (float(value),) if isinstance(value, (int, float)) else (1.0,)
        scales = tuple(1 / end if end else math.inf for end in ends) if inverted else ends
        if any(not abs(scale) <= LARGEST_FACTOR for scale in scales):
            raise Refused("its scores are multiplied by so large a number that they may undo their mask")
        return tuple(dict.fromkeys(scales))

    def _fill(
        self, op: TokenOp, key: str, mask: tuple[QueryKeyAxes, str], every: list[QueryKeyAxes], factor: float
    ) -> None:
        value, ref, limit = op.arg(key), op.ref(key), hiding_limit(op.dtype)
        if ref is not None:
            found = self._model.numbers.of(ref) if ref in self._model.fixed else None
            if found is None or not found.size or not np.all(found * factor <= limit):
                self._walk_argument(op, key, every, factor)
                return
            value = float(found.max())
        if isinstance(value, (int, float)):
            if value * factor > -limit / 10:
                raise Refused(_LARGE)
            if value * factor <= limit:
                self.masks[mask] = None

    def _walk_argument(self, op: TokenOp, key: str, every: list[QueryKeyAxes], factor: float) -> None:
        ref = op.ref(key)
        if ref is not None:
            self.walk(every[op.refs.index(ref)], factor)

    def _constant(self, name: str) -> bool:
        """Whether a value depends on no parameter."""
        return name in self._model.full or name in self._model.fixed
