"""Facts about masks that the analysis of losses asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from autopart.ir.graph import Literal, Op, Value
from autopart.passes.ops.row import OpRow
from autopart.passes.ops.table import op_name, row_of


class Masks:
    """Values that are 0 where a mask is empty: they make `(x * m).sum() / m.sum().clamp(min=1)` a mean over tokens.

    Clamping a count of the batch is not linear, so in general it couples micro-batches.  If the count is a number of
    set flags, the floor is at most 1, and the numerator is 0 wherever no flag is set, the clamp only replaces 0/0 by
    0/1: a micro-batch without flags has loss 0 and weight 0, and all others are unchanged.

    Values that are computed alike have the same digest: results of two ops of one target on the same operands, and
    casts and views that keep every element.
    """

    def __init__(self) -> None:
        self._digest: dict[str, str] = {}
        self._vanishes: dict[str, frozenset[str]] = {}  # digests of values that make this one zero where they are zero
        self._flags: set[str] = set()  # digests of values that are 0 or 1
        self._counts: dict[str, str] = {}  # for a sum of flags, their digest
        self._floors: dict[str, tuple[str, str]] = {}  # for a clamped count, the count and the digest of the flags
        self._summed: dict[str, str] = {}  # for a sum or mean, the digest of its operand

    def see(self, op: Op, values: Mapping[str, Value]) -> None:
        """Note the facts about the results of an op; ops come in order."""
        name, row, attrs = op_name(op.target), row_of(op.target), dict(op.attrs)
        refs = [value[1:] for _, value in op.attrs if isinstance(value, str) and value.startswith("%")]
        first = refs[0] if refs else ""
        for place, written in enumerate(op.writes):
            before, after = values[first].dtype if first in values else "", values[written].dtype
            kept = before == after or after.startswith(("float", "bfloat")) or before == "bool"  # others lose elements
            same = row.same_elements and first in values and kept
            self._digest[written] = self.of(first) if same else self._made(op, place)
            if values[written].dtype == "bool":
                self._flags.add(self._digest[written])
            self._vanishes[written] = self._vanishing(row, attrs, refs)
            if refs and (same or name in ("sum", "mean")):
                self._summed[written] = self._summed.get(first, self.of(first))
        if first in values and values[first].dtype == "bool":
            self._flags.add(self.of(first))
        if name == "sum" and first and not values[op.writes[0]].shape and self.of(first) in self._flags:
            self._counts[op.writes[0]] = self.of(first)
        low, high = attrs.get("min"), attrs.get("max")
        floored = name in ("clamp", "clamp_min") and isinstance(low, (int, float)) and 0 < low <= 1 and high is None
        if floored and first in self._counts and not op.random:
            self._floors[op.writes[0]] = (first, self._counts[first])
        elif row.same_elements and first in self._counts:
            self._counts[op.writes[0]] = self._counts[first]
        elif row.same_elements and first in self._floors:
            self._floors[op.writes[0]] = self._floors[first]

    def of(self, name: str) -> str:
        """The digest of a value; inputs and parameters have their names."""
        return self._digest.get(name, name)

    def count_behind(self, above: str, below: str) -> str | None:
        """The count before it was clamped to `below`, if `above` is 0 where that count is 0."""
        count, flag = self._floors.get(below, ("", ""))
        return count if count and flag in self._vanishes.get(above, frozenset()) else None

    def empty_with(self, above: str, below: str) -> bool:
        """Whether `above` is 0 where `below`, the sum or mean of a mask, is 0 (a mask has no negative elements)."""
        return self._summed.get(below) in self._vanishes.get(above, frozenset())

    def _made(self, op: Op, place: int) -> str:
        if op.random:
            return f"{op.name}.{place}"
        return _digest_of(op.target, [(key, self._numbered(value)) for key, value in op.attrs], place)

    def _numbered(self, value: Literal) -> Literal:
        if isinstance(value, tuple):
            return tuple(map(self._numbered, value))
        return "%" + self.of(value[1:]) if isinstance(value, str) and value.startswith("%") else value

    def _vanishing(self, row: OpRow, attrs: Mapping[str, Literal], refs: list[str]) -> frozenset[str]:
        nothing, name = frozenset[str](), row.name
        if row.linear == "product" and "+" not in row.axes:
            return nothing.union(*(self._vanishes.get(r, nothing) | {self.of(r)} for r in refs))
        if refs and (row.linear in ("each", "mean") or row.same_elements or name == "div"):
            return self._vanishes.get(refs[0], nothing)
        if name == "where" and attrs.get("other") == 0 and refs:
            return nothing | {self.of(refs[0])}
        if name == "cross_entropy_loss" and attrs.get("reduction") in (0, 2) and len(refs) == 2:
            counted = [("self", "%" + self.of(refs[1])), ("other", attrs.get("ignore_index", -100))]
            return nothing | {_digest_of("aten.ne.Scalar", counted, 0)}
        return nothing


def _digest_of(target: str, arguments: list[tuple[str, Literal]], place: int) -> str:
    return hashlib.sha256(repr((target, arguments, place)).encode()).hexdigest()[:16]
