"""What happened, or would happen: spans of time per rank.  The simulator and the runtime's trace write the same."""

from __future__ import annotations

from dataclasses import dataclass

from .program import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action from start_ns to end_ns, counted from the start of the step."""

    rank: int
    action: Action
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """spans in order of start; peak_bytes[r]: largest activation memory that rank r holds at once."""

    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()

    @property
    def step_ns(self) -> int:
        """End of the last span, in nanoseconds."""
        return max((span.end_ns for span in self.spans), default=0)

    def busy_ns(self, rank: int) -> int:
        """Nanoseconds that a rank spends in F and B."""
        return sum(s.end_ns - s.start_ns for s in self.spans if s.rank == rank and s.action.kind in "FB")
