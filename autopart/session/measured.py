"""A measured timeline: what every rank did in one step, on every rank."""

from __future__ import annotations

from autopart.ir.program import parse_action
from autopart.ir.timeline import Span, Timeline
from autopart.runtime.group.world import World


def gather_timeline(world: World, mine: Timeline) -> Timeline:
    """The spans of all ranks, in order of start.  Collective.

    Each rank counts from its own start of the step, which the ranks reach together: they have just agreed on the
    shape of the batch.  So starts of different ranks are comparable to within one such exchange.  O(spans).
    """
    lines = [f"{span.rank} {span.start_ns} {span.end_ns} {span.action}" for span in mine.spans]
    spans = [_span(line) for text in world.gather_text("\n".join(lines)) for line in text.splitlines()]
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))))


def _span(line: str) -> Span:
    rank, start_ns, end_ns, action = line.split()
    return Span(int(rank), parse_action(action), int(start_ns), int(end_ns))
