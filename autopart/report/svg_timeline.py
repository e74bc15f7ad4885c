"""Draw timelines as SVG: time to the right, a row for each rank, and under it what the rank holds.

Several timelines stand one below the other on one scale, so that a predicted step and a measured one can be compared.
A rank with several stages has a lane for each of them, the first on top.  Colours differ in lightness too, so that the
picture can be read in grey.  It refers to nothing outside of itself, and says what each compute is in a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from xml.sax.saxutils import escape

from autopart.ir.actions import ACTIONS, BACKWARD, COMPUTE, FORWARD, IN_FLIGHT, SEND
from autopart.ir.errors import printable
from autopart.ir.timeline import Span, Timeline, computing_ns

COLOURS = {"F": "#c4dcf2", "W": "#e39a3b", "I": "#5b93c9", "B": "#2b66a3"}
"""Fill of each compute; others, sums and the optimizer have `SUMS`."""
SUMS, FORWARD_MESSAGE, BACKWARD_MESSAGE = "#4a3566", "#7a9a5e", "#3d5229"
HELD, WAITING = "#c9c9c9", "#f3f3f3"
DARK = ("#5b93c9", "#2b66a3", SUMS)
"""Fills that carry white text."""

LEFT, RIGHT, TOP, AXIS, LEGEND = 64, 150, 26, 26, 24
"""Pixels beside, above and below the rows of a timeline, and of the legend."""
LETTER, TEXT = 5.6, 9
"""Pixels of a letter, and of a line of text."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Scale:
    """Sizes in pixels.  step_ns: of the whole width; lane, messages, held: heights within a row; gap: below it."""

    step_ns: int
    width: float
    lane: float
    messages: float
    held: float
    gap: float

    def x(self, ns: int) -> float:
        return LEFT + ns * self.width / self.step_ns

    def row(self, lanes: int) -> float:
        """Height of a row with this number of lanes."""
        return self.lane * lanes + self.messages + self.held + self.gap


@dataclass(frozen=True, slots=True)
class _Row:
    """What a rank did.  spans: in order.  stages: that it computes, ascending.  held: as `_held` returns it."""

    rank: int
    spans: tuple[Span, ...]
    stages: tuple[int, ...]
    held: tuple[tuple[int, int], ...]

    @property
    def most(self) -> int:
        """The most micro-batches that it holds at once."""
        return max((count for _, count in self.held), default=0)


def timeline_svg(timelines: Mapping[str, Timeline], *, width: int = 1200) -> str:
    """Return a picture of timelines by name, as "simulated" and "measured".

    Each row has the computes and sums of a rank, under them its sends, under those the micro-batches that it holds (F
    begun, B or W not over).  In a gap it waits.  width: pixels.  Rows shrink with their number, and labels
    are left out where they do not fit.  Raises ValueError for a width under 400.  O(spans * log spans).
    """
    if width < 400:
        raise ValueError(f"width is {width}, must be at least 400")
    step_ns = max([timeline.step_ns for timeline in timelines.values()], default=0) or 1
    panels = {name: _rows(timeline) for name, timeline in timelines.items()}
    lanes = sum(len(row.stages) for rows in panels.values() for row in rows)
    lane = max(6.0, min(20.0, 900 / max(1, lanes)))
    scale = _Scale(step_ns, width - LEFT - RIGHT, lane, lane / 4, lane / 2 + 2, lane / 4 + 2)
    parts: list[str] = []
    y = 4.0
    for name, rows in panels.items():
        parts += _panel(name, timelines[name], rows, scale, y)
        y += TOP + AXIS + sum(scale.row(len(row.stages)) for row in rows)
    parts += _legend(timelines.values(), y)
    size = f'width="{width}" height="{y + LEGEND:g}" viewBox="0 0 {width} {y + LEGEND:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{TEXT}">'
    back = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{said(', '.join(timelines))}</title>", back, *parts, "</svg>"]) + "\n"


def _rows(timeline: Timeline) -> list[_Row]:
    """Return a row for each rank, ascending."""
    rows = []
    for rank, spans in timeline.by_rank().items():
        stages = {span.action.stage for span in spans if span.action.is_a.role == COMPUTE}
        rows.append(_Row(rank, tuple(spans), tuple(sorted(stages)) or (0,), _held(spans)))
    return rows


def _held(spans: Sequence[Span]) -> tuple[tuple[int, int], ...]:
    """Return the moments at which a rank begins or ceases to hold a micro-batch of a stage, and how many it has then.

    A forward begins to hold at its start, a backward (or that of weights) ceases at its end.  Stages without a backward
    hold nothing.
    """
    changes = []
    returning = {span.action.stage for span in spans if IN_FLIGHT.get(span.action.kind, 0) < 0}
    for span in spans:
        change = IN_FLIGHT.get(span.action.kind, 0)
        if change and span.action.stage in returning:
            changes.append((span.start_ns if change > 0 else span.end_ns, change))
    changes.sort()
    counts = accumulate(change for _, change in changes)
    return tuple((moment, count) for (moment, _), count in zip(changes, counts, strict=True))


def _panel(name: str, timeline: Timeline, rows: list[_Row], scale: _Scale, y: float) -> Iterator[str]:
    """Yield the elements of one timeline, whose top is at y."""
    step_ns = timeline.step_ns or 1
    facts = f"{name}: step {timeline.step_ns / 1e6:.2f} ms, {timeline.bubble:.1%} of the ranks' time without computes"
    yield f'<g class="timeline"><title>{said(facts)}</title>'
    yield _text(LEFT, y + 14, facts, weight="bold")
    y += TOP
    most = max((row.most for row in rows), default=1) or 1
    for row in rows:
        peak_bytes = timeline.peak_bytes[row.rank] if row.rank < len(timeline.peak_bytes) else 0
        says = f"busy {computing_ns(row.spans) / step_ns:.0%}, holds {row.most}"
        says += f", {peak_bytes / MIB:.3g} MiB" if peak_bytes else ""
        height = scale.lane * len(row.stages)
        line = y + max(TEXT, height / 2 + TEXT * 0.35)
        yield f'<g class="rank"><title>rank {row.rank}: {says}</title>'
        yield _text(4, line, f"rank {row.rank}")
        yield _text(LEFT + scale.width + 6, line, says)
        yield _box(LEFT, y, scale.width, height, WAITING)
        yield from _drawn(row, scale, y, most)
        yield "</g>"
        y += scale.row(len(row.stages))
    yield from _axis(scale, y)
    yield "</g>"


def _drawn(row: _Row, scale: _Scale, y: float, most: int) -> Iterator[str]:
    """Yield what a rank did; most: the micro-batches that fill the height of what is held."""
    height = scale.lane * len(row.stages)
    for span in row.spans:
        kind = span.action.is_a
        if kind.role == COMPUTE:
            yield _compute(span, scale, y + scale.lane * row.stages.index(span.action.stage), len(row.stages) > 1)
        elif not kind.is_message and span.ns:
            yield _bar(span, scale, y, height, SUMS)
    sends = [span for span in row.spans if span.action.is_a.role == SEND and span.ns]
    for way, fill in ((FORWARD, FORWARD_MESSAGE), (BACKWARD, BACKWARD_MESSAGE)):
        yield from _messages([span for span in sends if span.action.is_a.way == way], scale, y + height, fill)
    yield from _holding(row, scale, y + height + scale.messages, most)


def _compute(span: Span, scale: _Scale, y: float, several: bool) -> str:
    fill = COLOURS.get(span.action.kind, SUMS)
    bar = _bar(span, scale, y, scale.lane, fill)
    room = span.ns * scale.width / scale.step_ns
    own = str(span.action).removeprefix(str(span.action.stage))
    texts = (str(span.action) if several else own, own, span.action.kind)
    label = next((text for text in texts if len(text) * LETTER <= room - 1), "")
    if not label or scale.lane < TEXT:
        return bar
    middle = (scale.x(span.start_ns) + scale.x(span.end_ns)) / 2
    colour = "#ffffff" if fill in DARK else "#000000"
    return bar + _text(middle, y + scale.lane / 2 + TEXT * 0.35, label, anchor="middle", fill=colour)


def _bar(span: Span, scale: _Scale, y: float, height: float, fill: str) -> str:
    start, end = scale.x(span.start_ns), scale.x(span.end_ns)
    line = 0.4 if end - start > 2 else 0
    taken = f"{span.start_ns / 1e6:.3f} to {span.end_ns / 1e6:.3f} ms"
    title = f"<title>{said(f'{span.action}, {span.action.is_a.label}, rank {span.rank}: {taken}')}</title>"
    place = f'x="{start:.2f}" y="{y:.2f}" width="{max(end - start, 0.3):.2f}" height="{height:.2f}"'
    return (
        f'<rect class="{span.action.kind}" {place} fill="{fill}" stroke="#ffffff" stroke-width="{line}">{title}</rect>'
    )


def _messages(sends: list[Span], scale: _Scale, y: float, fill: str) -> Iterator[str]:
    """Yield the sends of one way as one shape."""
    if sends:
        height = scale.messages * 0.8
        shape = "".join(
            f"M{scale.x(s.start_ns):.2f} {y:.2f}h{s.ns * scale.width / scale.step_ns:.2f}"
            f"v{height:.2f}H{scale.x(s.start_ns):.2f}z"
            for s in sends
        )
        busy_ms = sum(s.ns for s in sends) / 1e6
        title = said(f"{sends[0].action.is_a.label}: {len(sends)} messages, {busy_ms:.3f} ms")
        yield f'<path class="{sends[0].action.kind}" d="{shape}" fill="{fill}"><title>{title}</title></path>'


def _holding(row: _Row, scale: _Scale, y: float, most: int) -> Iterator[str]:
    """Yield the curve of what a rank holds, as a filled shape."""
    if row.held:
        bottom, height = y + scale.held - 1, scale.held - 2
        steps = "".join(f"H{scale.x(at):.2f}V{bottom - height * count / most:.2f}" for at, count in row.held)
        shape = f"M{scale.x(row.held[0][0]):.2f} {bottom:.2f}{steps}V{bottom:.2f}z"
        title = f"holds at most {row.most} micro-batches"
        yield f'<path class="held" d="{shape}" fill="{HELD}"><title>{title}</title></path>'


def _axis(scale: _Scale, y: float) -> Iterator[str]:
    """Yield a line with about ten round times in milliseconds."""
    rough = scale.step_ns / 10
    unit = 10 ** (len(str(int(rough))) - 1)
    tick = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    yield f'<path d="M{LEFT} {y:.2f}h{scale.width:.2f}" stroke="#000000" stroke-width="0.5"/>'
    for ns in range(0, scale.step_ns + 1, tick):
        yield f'<path d="M{scale.x(ns):.2f} {y:.2f}v4" stroke="#000000" stroke-width="0.5"/>'
        yield _text(scale.x(ns), y + 14, f"{ns / 1e6:g}", anchor="middle")
    yield _text(LEFT + scale.width + 6, y + 14, "ms")


def _legend(timelines: Iterable[Timeline], y: float) -> Iterator[str]:
    """Yield a sample of each kind that is drawn."""
    seen = {span.action.kind for timeline in timelines for span in timeline.spans}
    samples = [(COLOURS[kind], f"{kind} {ACTIONS[kind].label}") for kind in COLOURS if kind in seen]
    others = [kind for kind in seen if kind not in COLOURS and not ACTIONS[kind].is_message]
    if others:
        samples.append((SUMS, f"{', '.join(sorted(others))} sums, agreement, optimizer"))
    if not seen.isdisjoint(("SF", "SB")):
        samples += [(FORWARD_MESSAGE, "sends forward"), (BACKWARD_MESSAGE, "sends backward")]
    x = float(LEFT)
    for fill, text in [*samples, (HELD, "micro-batches held"), (WAITING, "waiting")]:
        yield _box(x, y + 4, 10, 10, fill)
        yield _text(x + 14, y + 13, text)
        x += 14 + len(text) * LETTER * 0.95 + 14


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#000000", weight: str = "normal"
) -> str:
    how = f'text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {how} pointer-events="none">{said(text)}</text>'


def said(text: str) -> str:
    """Return a text that can stand in a picture or a page."""
    return escape(printable(text))
