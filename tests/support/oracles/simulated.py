"""Pipelines of one op a stage, simulated with times that a test chooses."""

from __future__ import annotations

from itertools import pairwise

from autopart.ir.cluster import Cluster
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import RECEIVE, Program, parse_actions
from autopart.ir.timeline import Timeline
from autopart.passes.program.routing import route
from autopart.passes.simulation.simulate import Work, simulate
from autopart.passes.simulation.traffic import p2p_load, ring_load
from support.languages.graphs import cluster, graph


def chain(stages: int, micros: int, schedule: str, slices: int = 1) -> Program:
    """One op a stage, in a row."""
    g = graph("; ".join(f"v{s}:1 #4 <- {f'v{s - 1}' if s else 'x'}" for s in range(stages)))
    cut = (8,) * slices if slices > 1 else ()
    placed = tuple(Stage((f"v{s}",), (s,)) for s in range(stages))
    return route(Decision(stages, placed, (1,) * micros, schedule, token_slices=cut), g)


def work_of(program: Program, fwd_ns: tuple[int, ...], bwd_ns: tuple[int, ...], c: Cluster, size: int = 0) -> Work:
    """Every message has `size` bytes, every micro-batch in flight holds one."""
    ways = {(a.stage, a.peer, a.is_a.way) for a in program.order if a.peer is not None}
    at = program.stage_ranks
    messages = {(src, dst, way): (size, (p2p_load(c, at[src], at[dst]),)) for src, dst, way in ways}
    return Work(fwd_ns, bwd_ns, (1,) * len(fwd_ns), messages)


def play(program: Program, fwd_ns: tuple[int, ...], bwd_ns: tuple[int, ...], c: Cluster, size: int = 0) -> Timeline:
    return simulate(program, work_of(program, fwd_ns, bwd_ns, c, size))


def drawn(timeline: Timeline) -> list[tuple[int, str, int, int]]:
    return [(s.rank, str(s.action), s.start_ns, s.end_ns) for s in timeline.spans if s.start_ns < s.end_ns]


def ending(overlap: bool, optimizer_ns: tuple[int, ...] = (7,)) -> Timeline:
    """Two replicas of one stage, two micro-batches; gradients of 20 bytes, half of which go over each hop twice."""
    c = cluster(2, latency_ns=1)
    load = ring_load(c, (0, 1), 2)
    assert load.alone_ns(20) == 2 + 20
    program = Program(2, 2, ((0, 1),), parse_actions("0F0 0B0 0F1 0B1 0R 0O"))
    return simulate(program, Work((2,), (5,), (1,), {}, (), ((20, load),), optimizer_ns, overlap))


def check_path(timeline: Timeline) -> None:
    """From the start to the end of the step without a gap."""
    path = timeline.critical_path()
    if not timeline.step_ns:
        assert path == ()
        return
    assert path[0].start_ns == 0 and path[-1].end_ns == timeline.step_ns
    assert all(one.end_ns == two.start_ns for one, two in pairwise(path))
    assert all(span.action.is_a.role != RECEIVE and span.end_ns > span.start_ns for span in path)
