"""Axes as products of factors: which digits of which axes are the same.

Every axis begins as one factor.  Axes that share a letter of an op have equal factors; a reshape has the same factors
on both sides, in row-major order, so a factor is split into (major, minor) where the sizes divide.  A heads axis that a
view takes out of a hidden axis is a digit of it, and the same digit of the weights that made it.  One union-find pass,
O(axes).

Shardy, "Propagation" (compound factors): openxla/shardy, its page on propagation.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.graph import Graph
from autopart.passes.shards.calls import Call, calls_of, shapes_of

Digits = tuple[int, ...]
"""The factors of an axis, the major one first; an axis of size 1 has none."""


class Factors:
    """The factors of the axes of every value and parameter of a graph, by number; `size` tells that of each."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._split: dict[int, tuple[int, int]] = {}
        self._axes: dict[str, tuple[int | None, ...]] = {}
        self._settled: dict[str, tuple[Digits, ...]] = {}

    def _new(self, size: int) -> int:
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def add(self, name: str, shape: Sequence[int]) -> None:
        """Begin with one factor for each axis of a tensor."""
        self._axes[name] = tuple(self._new(size) if size > 1 else None for size in shape)

    def size(self, digit: int) -> int:
        """Return the size of a factor."""
        return self._size[digit]

    def of(self, name: str, axis: int) -> Digits:
        """Return the factors of an axis, as far as they are known now."""
        if name in self._settled:
            return self._settled[name][axis]
        own = self._axes[name][axis]
        return () if own is None else self._expanded(own)

    def settle(self) -> Factors:
        """Note that all is said of the axes, and return the factors."""
        self._settled = {name: tuple(self.of(name, n) for n in range(len(axes))) for name, axes in self._axes.items()}
        return self

    def flat(self, name: str) -> Digits:
        """Return the factors of all axes of a tensor, in row-major order."""
        return tuple(digit for axis in range(len(self._axes[name])) for digit in self.of(name, axis))

    def ndim(self, name: str) -> int:
        """Return the number of axes of a tensor."""
        return len(self._axes[name])

    def befores(self, name: str, axis: int) -> list[tuple[int, int]]:
        """Return the factors of an axis as (factor, product of those before it)."""
        found, before = [], 1
        for digit in self.of(name, axis):
            found.append((digit, before))
            before *= self._size[digit]
        return found

    def _root(self, digit: int) -> int:
        while self._parent[digit] != digit:
            self._parent[digit] = self._parent[self._parent[digit]]
            digit = self._parent[digit]
        return digit

    def _expanded(self, digit: int) -> Digits:
        found, left = [], [digit]
        while left:
            root = self._root(left.pop())
            if root in self._split:
                left.extend(reversed(self._split[root]))
            else:
                found.append(root)
        return tuple(found)

    def section(self, name: str, axis: int, sections: int, part: Digits, major: bool) -> None:
        """Say that an axis is (sections, part), equal parts side by side with these factors each; (part, sections) if
        the part is the major one."""
        more = (self._new(sections),) if sections > 1 else ()
        self.unify(self.of(name, axis), (*part, *more) if major else (*more, *part))

    def unify(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Say that two axes, or two lists of axes, have equal factors.  Where sizes do not divide, the factors up to
        the next common product stay apart."""
        left, right = list(reversed(one)), list(reversed(other))
        while left and right:
            a, b = self._pop(left), self._pop(right)
            small, large = sorted((a, b), key=lambda digit: self._size[digit])
            if self._size[a] == self._size[b]:
                self._parent[small] = large
            elif self._size[large] % self._size[small] == 0:
                minor = self._new(self._size[large] // self._size[small])
                major = self._new(self._size[small])
                self._split[large] = major, minor
                self._parent[small] = major
                (left if large == a else right).append(minor)
            else:
                self._skip(self._size[a], self._size[b], left, right)

    def _pop(self, stack: list[int]) -> int:
        first, *rest = self._expanded(stack.pop())
        stack.extend(reversed(rest))
        return first

    def _skip(self, a: int, b: int, left: list[int], right: list[int]) -> None:
        """Leave out factors of both sides until their products are equal."""
        while a != b and (left if a < b else right):
            if a < b:
                a *= self._size[self._pop(left)]
            else:
                b *= self._size[self._pop(right)]


def factors_of(graph: Graph, calls: Sequence[Call] | None = None) -> Factors:
    """Return the factors of a graph.  calls: its ops, if they are known.  O(axes)."""
    found = Factors()
    for name, shape in shapes_of(graph).items():
        found.add(name, shape)
    for call in calls if calls is not None else calls_of(graph):
        _unify(found, call)
    return found.settle()


def _unify(factors: Factors, call: Call) -> None:
    if call.reshapes:
        factors.unify(factors.flat(call.reads[0]), factors.flat(call.op.writes[0]))
    for places in call.axes().values():
        (first, axis), *rest = places
        for name, other in rest:
            factors.unify(factors.of(first, axis), factors.of(name, other))
    for each in call.sections():
        (part, own), (whole, axis) = each.part, each.whole
        factors.section(
            whole, axis, call.shape(whole)[axis] // call.shape(part)[own], factors.of(part, own), each.major
        )
