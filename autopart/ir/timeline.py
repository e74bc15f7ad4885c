"""What happened, or would happen, in one step: spans of time per rank, simulated or measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopart.ir.actions import COMPUTE, FORWARD, RECEIVE, Action, parse_action
from autopart.ir.errors import ProgramError

MOST_SPANS = 60_000
"""Spans of a step up to which a plan keeps them: about 1.5 MB of its file."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a rank from start_ns to end_ns, in nanoseconds since the start of the step."""

    rank: int
    action: Action
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        """How long it takes, in nanoseconds."""
        return self.end_ns - self.start_ns


def computing_ns(spans: Iterable[Span]) -> int:
    """Return the nanoseconds of the computes among spans."""
    return sum(span.ns for span in spans if span.action.is_a.role == COMPUTE)


def stage_sums(spans: Iterable[Span]) -> dict[int, tuple[int, int, int]]:
    """Return by stage the nanoseconds of forwards and of backwards, and of how many micro-batches; each rank's count
    apart."""
    taken: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    micros: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for span in spans:
        kind = span.action.is_a
        if kind.role == COMPUTE:
            taken[span.action.stage][kind.way != FORWARD] += span.ns
            micros[span.action.stage].add((span.rank, span.action.micro))
    return {s: (forward, backward, len(micros[s])) for s, (forward, backward) in taken.items()}


@dataclass(frozen=True, slots=True)
class Timeline:
    """spans: in order of their start.  peak_bytes[r]: the most activation memory that rank r holds at once."""

    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()

    @property
    def step_ns(self) -> int:
        """End of the last span, in nanoseconds."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks that have spans do not compute."""
        whole = len({span.rank for span in self.spans}) * self.step_ns
        return max(0.0, 1 - computing_ns(self.spans) / whole) if whole else 0.0

    def busy_ns(self, rank: int) -> int:
        """Return the nanoseconds that a rank spends computing."""
        return computing_ns(span for span in self.spans if span.rank == rank)

    def by_rank(self) -> dict[int, list[Span]]:
        """Return the spans of each rank that has some, in order of their start; ranks ascend."""
        found: dict[int, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: (span.rank, span.start_ns, span.end_ns)):
            found.setdefault(span.rank, []).append(span)
        return found


_LINE = re.compile(r"rank (\d{1,9}):((?: [0-9A-Z.<>]{2,40}@\d{1,18}\+\d{1,18})*)$")


def spans_text(timeline: Timeline) -> tuple[str, ...]:
    """Return a line for each rank, like "rank 0: 0F0@0+120 0SF0>1@120+30": start and length in nanoseconds.

    Receives are left out: they end when the message of the other side arrives.  Returns () for more than `MOST_SPANS`.
    """
    kept = [span for span in timeline.spans if span.action.is_a.role != RECEIVE]
    if len(kept) > MOST_SPANS:
        return ()
    lines: dict[int, list[str]] = {}
    for span in kept:
        lines.setdefault(span.rank, []).append(f"{span.action}@{span.start_ns}+{span.ns}")
    return tuple(" ".join([f"rank {rank}:", *lines[rank]]) for rank in sorted(lines))


def read_spans(lines: Sequence[str]) -> Timeline:
    """Read what `spans_text` wrote; spans are in order of their start.  Raises ProgramError."""
    if (count := sum(line.count("@") for line in lines)) > MOST_SPANS:
        raise ProgramError(f"a plan keeps at most {MOST_SPANS} spans, not {count}")
    spans: list[Span] = []
    for line in lines:
        found = _LINE.match(line)
        if not found:
            raise ProgramError("a line of spans is not valid", why="lines look like rank 0: 0F0@0+120 0B0@120+240")
        for word in found[2].split():
            action, _, times = word.partition("@")
            start, _, length = times.partition("+")
            spans.append(Span(int(found[1]), parse_action(action), int(start), int(start) + int(length)))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))))
