"""Pipelines of one op per stage, simulated with given times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopart.ir.actions import COLLECTIVE, COMPUTE, RECEIVE, SEND, SENDS
from autopart.ir.cluster import Cluster
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.program.routing import route
from autopart.passes.simulation.simulate import Work, simulate
from autopart.passes.simulation.traffic import p2p_load, ring_load
from support.languages.graphs import cluster, graph
from support.languages.parts import parse_actions


def chain(stages: int, micros: int, schedule: str, slices: int = 1) -> Program:
    """Return the program of a chain with one op per stage."""
    g = graph("; ".join(f"v{s}:1 #4 <- {f'v{s - 1}' if s else 'x'}" for s in range(stages)))
    cut = (8,) * slices if slices > 1 else ()
    placed = tuple(Stage((f"v{s}",), (s,)) for s in range(stages))
    return route(Decision(stages, placed, (1,) * micros, schedule, token_slices=cut), g)


def work_of(program: Program, fwd_ns: tuple[int, ...], bwd_ns: tuple[int, ...], c: Cluster, size: int = 0) -> Work:
    """Return the work of a program in which every message has `size` bytes and every micro-batch in flight holds
    one.
    """
    ways = {(a.stage, a.peer, a.is_a.way) for a in program.order if a.peer is not None}
    at = program.stage_ranks
    messages = {(src, dst, way): (size, (p2p_load(c, at[src], at[dst]),)) for src, dst, way in ways}
    return Work(fwd_ns, bwd_ns, (1,) * len(fwd_ns), messages)


def play(program: Program, fwd_ns: tuple[int, ...], bwd_ns: tuple[int, ...], c: Cluster, size: int = 0) -> Timeline:
    return simulate(program, work_of(program, fwd_ns, bwd_ns, c, size))


def drawn(timeline: Timeline) -> list[tuple[int, str, int, int]]:
    return [(s.rank, str(s.action), s.start_ns, s.end_ns) for s in timeline.spans if s.start_ns < s.end_ns]


def ending(overlap: bool, optimizer_ns: tuple[int, ...] = (7,)) -> Timeline:
    """Simulate two replicas of one stage with two micro-batches and 20 bytes of gradients."""
    c = cluster(2, latency_ns=1)
    load = ring_load(c, (0, 1), 2)
    assert load.alone_ns(20) == 2 + 20
    program = Program(2, 2, ((0, 1),), parse_actions("0F0 0B0 0F1 0B1 0R 0O"))
    return simulate(program, Work((2,), (5,), (1,), {}, (), ((20, load),), optimizer_ns, overlap))


def check_path(timeline: Timeline) -> None:
    """Check that the critical path covers the step from start to end without a gap."""
    path = critical_path(timeline)
    if not timeline.step_ns:
        assert path == ()
        return
    assert path[0].start_ns == 0 and path[-1].end_ns == timeline.step_ns
    assert all(one.end_ns == two.start_ns for one, two in pairwise(path))
    assert all(span.action.is_a.role != RECEIVE and span.end_ns > span.start_ns for span in path)


def memory(timeline: Timeline, rank: int, held_bytes: int) -> tuple[tuple[int, int], ...]:
    """The memory curve of a rank: (nanosecond, bytes of activations) after every change; held_bytes: of one
    micro-batch in flight, kept from the start of its forward to the end of its backward."""
    spans = [s for s in timeline.spans if s.rank == rank and s.action.is_a.role == COMPUTE]
    changes = [(s.end_ns, -held_bytes) if s.action.is_a.frees else (s.start_ns, held_bytes) for s in spans]
    curve, held = [(0, 0)], 0
    for when, change in sorted(changes, key=lambda c: c[0]):  # stable: as the rank does them
        held += change
        curve.append((when, held))
    return tuple(curve)


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Spans, first to last, each of which ends when the next starts: what a shorter step has to shorten.

    Found backwards from the end of the step.  A compute starts when its rank is free or its message is there; the
    latter is preferred, and leads to the sender.  What is sent may start before the one ahead of it has arrived,
    when that has left the port; the one ahead then ends there.  Spans do not say which ports they use: the one
    ahead is taken to be the last under way on the same channel, from the same stage, to the same one, or else of all.
    O(spans log spans).
    """
    real = [s for s in timeline.spans if s.action.is_a.role != RECEIVE and s.end_ns > s.start_ns]
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


def _uses_ports(span: Span) -> bool:
    return span.action.is_a.role in (SEND, COLLECTIVE)


def _wires(span: Span) -> list[tuple[int | None, int | None]]:
    """Where to look for what holds a port that this span needs, the likeliest first."""
    stage, peer = span.action.stage, span.action.peer
    return [(stage, peer), (stage, None), (None, peer), (None, None)]


def _ahead(span: Span, wires: Sequence[Sequence[Span]]) -> Span | None:
    """Return the last message that started before this one and had not arrived yet, cut where this one starts."""
    for sent in wires:
        before = sent[: bisect_left(sent, span.start_ns, key=lambda s: s.start_ns)]
        under_way = next((s for s in reversed(before) if s.end_ns > span.start_ns), None)
        if under_way is not None:
            return replace(under_way, end_ns=span.start_ns)
    return None


def _cause(span: Span, ended: list[Span]) -> Span | None:
    """Of the spans that end when this one starts, the one that let it start."""
    stage, kind = span.action.stage, span.action.is_a
    sends = [s for s in ended if kind.role == COMPUTE and s.action.peer == stage and s.action.kind == SENDS[kind.way]]
    own = [s for s in ended if s.rank == span.rank and (kind.role == SEND or s.action.is_a.role != SEND)]
    return next(iter([*sends, *own, *ended]), None)
