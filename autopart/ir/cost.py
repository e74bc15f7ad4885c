"""The cost of one op, at the number of rows its graph was captured with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopart.ir.errors import GraphError


@dataclass(frozen=True, slots=True)
class Cost:
    """Time, work and memory of one op for one micro-batch.

    fwd_ns, bwd_ns: nanoseconds of the forward and of the whole backward (input and weight part).
    saved_bytes: bytes kept from forward to backward.  scratch_bytes: bytes needed only while it runs.
    flops: floating point operations of the forward.  tail_ns: nanoseconds at the end of the forward of a block of ops
    whose results its backward does not need; 0 for a single op.  weight_ns: the part of bwd_ns that only makes
    gradients of weights, and can wait.  weight_bytes: bytes kept until it runs, where the backward has two parts.
    """

    fwd_ns: int = 0
    bwd_ns: int = 0
    saved_bytes: int = 0
    scratch_bytes: int = 0
    flops: int = 0
    tail_ns: int = 0
    weight_ns: int = 0
    weight_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of running both, one after the other."""
        return Cost(
            self.fwd_ns + other.fwd_ns,
            self.bwd_ns + other.bwd_ns,
            self.saved_bytes + other.saved_bytes,
            max(self.scratch_bytes, other.scratch_bytes),
            self.flops + other.flops,
            other.tail_ns,
            self.weight_ns + other.weight_ns,
            self.weight_bytes + other.weight_bytes,
        )

    @property
    def total_ns(self) -> int:
        """Nanoseconds of forward and backward."""
        return self.fwd_ns + self.bwd_ns


def check(cost: Cost) -> Cost:
    """Check that every field is a non-negative integer, and return the cost.  Raises GraphError."""
    for field in fields(cost):
        amount = getattr(cost, field.name)
        if not isinstance(amount, int) or amount < 0:
            raise GraphError(f"cost field {field.name} is {amount!r}", why="costs are non-negative integers")
    return cost
