"""What happened, or would happen: spans of time per rank.  The simulator and the runtime's trace write the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopart.ir.program import COLLECTIVE, COMPUTE, RECEIVE, SEND, SENDS, Action


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
        spans = [s for s in self.spans if s.rank == rank and s.action.is_a.role == COMPUTE]
        changes = [(s.end_ns, -held_bytes) if s.action.is_a.frees else (s.start_ns, held_bytes) for s in spans]
        curve, held = [(0, 0)], 0
        for when, change in sorted(changes, key=lambda c: c[0]):  # stable: as the rank does them
            held += change
            curve.append((when, held))
        return tuple(curve)

    def critical_path(self) -> tuple[Span, ...]:
        """Spans, first to last, each of which ends when the next starts: what a shorter step has to shorten.

        Found backwards from the end of the step.  A compute starts when its rank is free or its message is there; the
        latter is preferred, and leads to the sender.  What is sent may start before the one ahead of it has arrived,
        when that has left the port; the one ahead then ends there.  Spans do not say which ports they use: the one
        ahead is taken to be the last on the same channel, from the same stage, to the same one, or else of all.
        O(spans log spans).
        """
        real = [s for s in self.spans if s.action.is_a.role != RECEIVE and s.end_ns > s.start_ns]
        ends: dict[int, list[Span]] = {}
        wires: dict[tuple[int | None, int | None], list[Span]] = {}
        for span in sorted(real, key=lambda s: s.start_ns):
            ends.setdefault(span.end_ns, []).append(span)
            if _uses_ports(span):
                for key in _wires(span):
                    wires.setdefault(key, []).append(span)
        path: list[Span] = []
        now = max(real, key=lambda s: s.end_ns, default=None)
        while now is not None:
            path.append(now)
            cause = _cause(now, ends.get(now.start_ns, []))
            if cause is None and now.start_ns and _uses_ports(now):
                cause = _ahead(now, [wires[key] for key in _wires(now)])
            now = cause
        return tuple(reversed(path))

    def busy_ns(self, rank: int) -> int:
        """Nanoseconds that a rank spends computing."""
        return sum(s.end_ns - s.start_ns for s in self.spans if s.rank == rank and s.action.is_a.role == COMPUTE)


def _uses_ports(span: Span) -> bool:
    return span.action.is_a.role in (SEND, COLLECTIVE)


def _wires(span: Span) -> list[tuple[int | None, int | None]]:
    """Where to look for what holds a port that this span needs, the likeliest first."""
    stage, peer = span.action.stage, span.action.peer
    return [(stage, peer), (stage, None), (None, peer), (None, None)]


def _ahead(span: Span, wires: Sequence[Sequence[Span]]) -> Span | None:
    """The last that was started before this one, and was not there yet; it ends here."""
    for sent in wires:
        place = bisect_left(sent, span.start_ns, key=lambda s: s.start_ns)
        if place and sent[place - 1].end_ns > span.start_ns:
            return replace(sent[place - 1], end_ns=span.start_ns)
    return None


def _cause(span: Span, ended: list[Span]) -> Span | None:
    """Of the spans that end when this one starts, the one that let it start."""
    stage, kind = span.action.stage, span.action.is_a
    sends = [s for s in ended if kind.role == COMPUTE and s.action.peer == stage and s.action.kind == SENDS[kind.way]]
    own = [s for s in ended if s.rank == span.rank and (kind.role == SEND or s.action.is_a.role != SEND)]
    return next(iter([*sends, *own, *ended]), None)
