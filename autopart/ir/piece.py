"""Pieces of tensors: what a rank holds, keeps, owns, saves and moves is a set of pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_PART = re.compile(r"(?s)(.*)\[(0|[1-9]\d*):(0|[1-9]\d*)/([1-9]\d*)\]")


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Part `index` of `parts` equal parts of a tensor along one axis; a whole tensor is the only one of its parts.

    name: of the tensor.  A whole tensor prints as its name, and "w[1:0/2]" is the first half of w along axis 1.
    """

    name: str
    axis: int = 0
    parts: int = 1
    index: int = 0

    def __str__(self) -> str:
        return self.name if parse_piece(self.name) == self else f"{self.name}[{self.axis}:{self.index}/{self.parts}]"

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.parts == 1


@lru_cache(maxsize=1 << 16)
def whole(name: str) -> Piece:
    """Return a whole tensor."""
    return Piece(name)


def cut(name: str, axis: int, parts: int) -> tuple[Piece, ...]:
    """Return all pieces of a tensor, in order."""
    return tuple(Piece(name, axis, parts, index) for index in range(parts)) if parts > 1 else (whole(name),)


def parse_piece(text: str) -> Piece:
    """Return the piece that prints like this."""
    found = _PART.fullmatch(text)
    axis, index, parts = map(int, found.groups()[1:]) if found else (0, 0, 0)
    known = found and index < parts and (parts > 1 or axis == 0)
    return Piece(found[1], axis, parts, index) if found and known else whole(text)


def overlap(a: Piece, b: Piece) -> Fraction:
    """Return how much of their tensor two pieces of it have in common."""
    if a.axis != b.axis:
        return Fraction(1, a.parts * b.parts)
    first = max(Fraction(a.index, a.parts), Fraction(b.index, b.parts))
    return max(Fraction(0), min(Fraction(a.index + 1, a.parts), Fraction(b.index + 1, b.parts)) - first)
