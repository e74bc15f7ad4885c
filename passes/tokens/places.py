"""Values and where their queries and keys lie, followed from results to operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autopart.passes.tokens.recipe import Shape

FALSE, TRUE, NEGATIVE, ZERO, ONE = "false", "true", "negative", "zero", "one"
VERY_NEGATIVE = -1e9
"""A bias from here on makes a probability 0 whatever the scores are, which are far smaller."""
_LOWEST = {"float16": -65504.0}
SAME = ("clone", "contiguous", "detach", "expand", "slice", "transpose", "permute", "alias", "to")
RESHAPED = ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")


class Place(NamedTuple):
    """A value and where its queries and keys lie; None where it is the same for all of them."""

    name: str
    queries: int | None
    keys: int | None


def operand_place(name: str, operand: Sequence[str], result: Sequence[str], place: Place) -> Place:
    """Where an operand holds what its result holds at `place`."""

    def axis(number: int | None) -> int | None:
        found = "" if number is None else result[number]
        return operand.index(found) if found and found in operand else None

    return Place(name, axis(place.queries), axis(place.keys))


def lowest(dtype: str) -> float:
    """Up to which number a bias of this type hides."""
    return max(VERY_NEGATIVE, _LOWEST.get(dtype, -math.inf))


def through_reshape(place: Place, before: Shape, after: Shape) -> tuple[int | None, int | None] | None:
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
