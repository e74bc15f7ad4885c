"""What a schedule takes with the times that its computes had in a step, by the simulator: what the order allows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.ir.program import Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.simulation.simulate import Work, step_ns


@dataclass(frozen=True)
class Busy:
    """Mean nanoseconds of the computes of one rank in one step, by (kind, stage), and of all outside its actions."""

    computes: dict[tuple[str, int], int]
    outside: int


def busy(spans: Sequence[Span], seconds: float) -> Busy:
    """Return the times of one rank.  seconds: of its whole step, with the optimizer."""
    found: dict[tuple[str, int], list[int]] = {}
    for span in spans:
        if span.action.kind in "FBIW":
            found.setdefault((span.action.kind, span.action.stage), []).append(span.end_ns - span.start_ns)
    means = {key: int(statistics.mean(values)) for key, values in found.items()}
    return Busy(means, int(seconds * 1e9) - Timeline(tuple(spans)).step_ns)


def allowed_seconds(program: Program, ranks: Sequence[Busy]) -> float:
    """Return the simulated step with these times.  Messages are free; what the ranks did outside is the least of it."""
    times = {key: ns for rank in ranks for key, ns in rank.computes.items()}
    stages = range(len(program.stage_ranks))
    weights = tuple(times.get(("W", s), 0) for s in stages)
    backward = tuple(times.get(("B", s), times.get(("I", s), 0) + weights[s]) for s in stages)
    work = Work(tuple(times["F", s] for s in stages), backward, (0,) * len(stages), {}, weight_ns=weights)
    return (step_ns(program, work) + min(rank.outside for rank in ranks)) * 1e-9
