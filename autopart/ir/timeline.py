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

    def memory(self, rank: int, held_bytes: int) -> tuple[tuple[int, int], ...]:
        """The memory curve of a rank: (nanosecond, bytes of activations) after every change; held_bytes: of one
        micro-batch in flight, kept from the start of its forward to the end of its backward."""
        spans = [s for s in self.spans if s.rank == rank and s.action.kind in "FB"]
        changes = [(s.start_ns, held_bytes) if s.action.kind == "F" else (s.end_ns, -held_bytes) for s in spans]
        curve, held = [(0, 0)], 0
        for when, change in sorted(changes):
            held += change
            curve.append((when, held))
        return tuple(curve)

    def critical_path(self) -> tuple[Span, ...]:
        """Spans, first to last, each of which ends when the next can start: what a shorter step has to shorten.

        Found backwards from the end of the step.  A compute starts when its rank is free or its message is there; the
        latter is preferred, and leads to the sender.  O(spans).
        """
        ends: dict[int, list[Span]] = {}
        for span in self.spans:
            if span.action.kind not in ("RF", "RB") and span.end_ns > span.start_ns:
                ends.setdefault(span.end_ns, []).append(span)
        path: list[Span] = []
        now = max(self.spans, key=lambda s: s.end_ns, default=None)
        while now is not None:
            path.append(now)
            now = _cause(now, ends.get(now.start_ns, []))
        return tuple(reversed(path))

    def busy_ns(self, rank: int) -> int:
        """Nanoseconds that a rank spends in F and B."""
        return sum(s.end_ns - s.start_ns for s in self.spans if s.rank == rank and s.action.kind in "FB")


def _cause(span: Span, ended: list[Span]) -> Span | None:
    """Of the spans that end when this one starts, the one that let it start."""
    stage, kind = span.action.stage, span.action.kind
    sends = [s for s in ended if s.action.peer == stage and s.action.kind == f"S{kind}"]
    own = [s for s in ended if s.rank == span.rank and (kind[0] == "S" or s.action.kind[0] != "S")]
    return next(iter([*sends, *own, *ended]), None)
