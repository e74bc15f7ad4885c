"""What limits a simulated step: the chain of spans that ends last, each of which began when the one before it was over.

A compute waits for its rank, or for a message of the same micro-batch; a message for the compute whose results it
carries, or for the message before it; a sum for the rank that comes last.  What lies between two spans of the chain is
waiting: for a link that others use, or for a host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.actions import COMPUTE, OPTIMIZER, RECEIVE, SEND, SENDS
from autopart.ir.timeline import Span, Timeline

MESSAGES, SUMS, UPDATE, WAITING = "messages", "sums of gradients", "optimizer", "waiting for links and hosts"


@dataclass(frozen=True, slots=True)
class Link:
    """A span of the chain.  from_ns: when the one before it was over, or its start if that is later."""

    span: Span
    from_ns: int


def critical_path(timeline: Timeline) -> tuple[Link, ...]:
    """Return the chain in order of time; () for an empty timeline.  O(spans log spans)."""
    spans = sorted((s for s in timeline.spans if s.action.is_a.role != RECEIVE), key=lambda span: span.end_ns)
    order = _Order(spans)
    chain: list[Link] = []
    last = spans[-1] if spans else None
    while last is not None:
        before = order.before(last)
        chain.append(Link(last, max(last.start_ns, before.end_ns if before is not None else 0)))
        last = before
    return tuple(reversed(chain))


class _Order:
    """The spans of a step, without receives, by the order in which they end; of equal ends as the ranks ran them."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._place = {id(span): place for place, span in enumerate(spans)}
        self._own: dict[int, list[Span]] = defaultdict(list)
        self._sent: dict[int, list[Span]] = defaultdict(list)
        self._arriving: dict[tuple[str, int, int, int], list[Span]] = defaultdict(list)
        self._all = [span for span in spans if span.action.is_a.role != SEND]
        for span in self._all:
            self._own[span.rank].append(span)
        for span in spans:
            if span.action.is_a.role == SEND and span.action.peer is not None:
                slot = span.action.slot
                self._sent[span.rank].append(span)
                self._arriving[span.action.kind, span.action.peer, slot.micro, slot.slice].append(span)

    def before(self, span: Span) -> Span | None:
        """Return what a span waited for; None for the first of the step."""
        own, arrived = self._latest(self._own.get(span.rank, ()), span), list[Span]()
        kind, slot = span.action.is_a, span.action.slot
        if kind.role == COMPUTE and kind.way in SENDS:
            messages = self._arriving[SENDS[kind.way], slot.stage, slot.micro, slot.slice]
            here = self._place[id(span)]
            arrived = [each for each in messages if each.end_ns <= span.start_ns and self._place[id(each)] < here]
        elif kind.role == SEND and own is not None and own.end_ns < span.start_ns:  # its port was busy
            sent = self._latest(self._sent[span.rank], span, serial=False)
            arrived = [sent] if sent is not None and sent.start_ns < span.start_ns else []
        found = [*([own] if own is not None else ()), *arrived]
        if not found and span.start_ns:  # a sum that another rank was waited for
            other = self._latest(self._all, span)
            found = [other] if other is not None else []
        return max(found, key=lambda each: each.end_ns, default=None)

    def _latest(self, spans: Sequence[Span], span: Span, *, serial: bool = True) -> Span | None:
        """Return the last of these spans that was over before a span began; before it ended, if it is not serial, or a
        sum, which may begin while the last backward runs."""
        serial = serial and span.action.is_a.role in (COMPUTE, SEND)
        at = bisect_left(spans, self._place[id(span)], key=lambda each: self._place[id(each)])
        while at and serial and spans[at - 1].end_ns > span.start_ns:
            at -= 1
        return spans[at - 1] if at else None


def what_limits(path: Sequence[Link], step_ns: int) -> dict[str, int]:
    """Return the nanoseconds of the step by what the chain does in them, the most first; they add up to the step."""
    found: dict[str, int] = defaultdict(int)
    now = 0
    for link in path:
        action, role = link.span.action, link.span.action.is_a.role
        what = f"computes of stage {action.stage}" if role == COMPUTE else MESSAGES if role == SEND else SUMS
        found[UPDATE if action.kind == OPTIMIZER else what] += link.span.end_ns - link.from_ns
        found[WAITING] += link.from_ns - now
        now = link.span.end_ns
    found[WAITING] += step_ns - now
    return {what: ns for what, ns in sorted(found.items(), key=lambda each: -each[1]) if ns}
