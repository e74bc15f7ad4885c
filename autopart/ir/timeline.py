"""What happened, or would happen, in one step: spans of time per rank, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.actions import COMPUTE, Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a rank from start_ns to end_ns, in nanoseconds since the start of the step."""

    rank: int
    action: Action
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """spans: in order of their start.  peak_bytes[r]: the most activation memory that rank r holds at once."""

    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()

    @property
    def step_ns(self) -> int:
        """End of the last span, in nanoseconds."""
        return max((span.end_ns for span in self.spans), default=0)

    def busy_ns(self, rank: int) -> int:
        """Return the nanoseconds that a rank spends computing."""
        return sum(s.end_ns - s.start_ns for s in self.spans if s.rank == rank and s.action.is_a.role == COMPUTE)
