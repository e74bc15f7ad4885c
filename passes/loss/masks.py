"""Values that are 0 where a mask is empty: they make `(x * m).sum() / m.sum().clamp(min=1)` a mean over tokens.

Clamping a count of the batch is not linear, so in general it couples micro-batches.  If the count is a number of set
flags, the floor is at most 1, and the numerator is 0 wherever no flag is set, the clamp only replaces 0/0 by 0/1: a
micro-batch without flags has loss 0 and weight 0, and all others are unchanged.

Values that are computed alike have the same digest: results of two ops of one target on the same operands, and casts
and views that keep every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopart.ir.graph import Literal, Op, Value
from autopart.passes.ops.row import OpRow
from autopart.passes.ops.table import op_name, row_of

_FLOORS = {"clamp", "clamp_min"}


@dataclass
class Masks:
    """Facts about the values seen so far.

    digest: equal for values that are computed alike.  vanishes: digests of values that make this one zero where they
    are zero.  flags: digests of values that are 0 or 1.  counts: for a sum of flags, their digest.  floors: for a
    clamped count, the count and the digest of the flags.  summed: for a sum or mean, the digest of its operand.
    """

    digest: dict[str, str] = field(default_factory=dict)
    vanishes: dict[str, frozenset[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    counts: dict[str, str] = field(default_factory=dict)
    floors: dict[str, tuple[str, str]] = field(default_factory=dict)
    summed: dict[str, str] = field(default_factory=dict)

    def see(self, op: Op, values: Mapping[str, Value]) -> None:
        """Note the facts about the results of an op; ops come in order."""
        name, row, attrs = op_name(op.target), row_of(op.target), dict(op.attrs)
        refs = [value[1:] for _, value in op.attrs if isinstance(value, str) and value.startswith("%")]
        first = refs[0] if refs else ""
        for place, written in enumerate(op.writes):
            same = row.same_elements and not _loses(values, first, written)
            self.digest[written] = self.of(first) if same else self._fresh(op, place)
            if values[written].dtype == "bool":
                self.flags.add(self.digest[written])
            self.vanishes[written] = self._vanishing(row, attrs, refs)
            if refs and (same or name in ("sum", "mean")):
                self.summed[written] = self.summed.get(first, self.of(first))
        if first in values and values[first].dtype == "bool":
            self.flags.add(self.of(first))
        if name == "sum" and first and not values[op.writes[0]].shape and self.of(first) in self.flags:
            self.counts[op.writes[0]] = self.of(first)
        low, high = attrs.get("min"), attrs.get("max")
        floored = name in _FLOORS and isinstance(low, (int, float)) and 0 < low <= 1 and high is None
        if floored and first in self.counts and not op.random:
            self.floors[op.writes[0]] = (first, self.counts[first])
        elif row.same_elements and first in self.counts:
            self.counts[op.writes[0]] = self.counts[first]
        elif row.same_elements and first in self.floors:
            self.floors[op.writes[0]] = self.floors[first]

    def of(self, name: str) -> str:
        """The digest of a value; inputs and parameters have their names."""
        return self.digest.get(name, name)

    def count_behind(self, above: str, below: str) -> str | None:
        """The count before it was clamped to `below`, if `above` is 0 where that count is 0."""
        count, flag = self.floors.get(below, ("", ""))
        return count if count and flag in self.vanishes.get(above, frozenset()) else None

    def empty_with(self, above: str, below: str) -> bool:
        """Whether `above` is 0 where `below`, the sum or mean of a mask, is 0 (a mask has no negative elements)."""
        return self.summed.get(below) in self.vanishes.get(above, frozenset())

    def _fresh(self, op: Op, place: int) -> str:
        if op.random:
            return f"{op.name}.{place}"
        text = repr((op.target, [(key, self._numbered(value)) for key, value in op.attrs], place))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _numbered(self, value: Literal) -> Literal:
        if isinstance(value, tuple):
            return tuple(map(self._numbered, value))
        return "%" + self.of(value[1:]) if isinstance(value, str) and value.startswith("%") else value

    def _vanishing(self, row: OpRow, attrs: Mapping[str, Literal], refs: list[str]) -> frozenset[str]:
        nothing, name = frozenset[str](), row.name
        if row.linear == "product" and "+" not in row.axes:
            return nothing.union(*(self.vanishes.get(r, nothing) | {self.of(r)} for r in refs))
        if refs and (row.linear in ("each", "mean") or row.same_elements or name == "div"):
            return self.vanishes.get(refs[0], nothing)
        if name == "where" and attrs.get("other") == 0 and refs:
            return nothing | {self.of(refs[0])}
        if name == "cross_entropy_loss" and attrs.get("reduction") in (0, 2) and len(refs) == 2:
            ignore = attrs.get("ignore_index", -100)
            text = repr(("aten.ne.Scalar", [("self", "%" + self.of(refs[1])), ("other", ignore)], 0))
            return nothing | {hashlib.sha256(text.encode()).hexdigest()[:16]}
        return nothing


def _loses(values: Mapping[str, Value], source: str, result: str) -> bool:
    """Whether a cast may change the elements: from floating point to bool or integer."""
    if source not in values:
        return True
    before, after = values[source].dtype, values[result].dtype
    return before != after and not after.startswith(("float", "bfloat")) and before != "bool"
