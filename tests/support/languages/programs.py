"""Programs of a small graph with skips, with given stages and ranks."""

from __future__ import annotations

from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.passes.program.routing import route
from support.languages.graphs import graph

SKIPS = "a +w <- x; b <- a y; c <- b a; d +w <- c b"
"""Four ops with skips, a late input and a tied parameter."""


def program(
    schedule: str = "1f1b",
    micros: int = 3,
    stages: str = "a | b | c | d",
    ranks: tuple[tuple[int, ...], ...] | None = None,
    slices: int = 1,
) -> Program:
    rows = [tuple(names.split()) for names in stages.split("|")]
    ranks = ranks or tuple((s,) for s in range(len(rows)))
    placed = tuple(Stage(names, own) for names, own in zip(rows, ranks, strict=True))
    world = 1 + max(rank for own in ranks for rank in own)
    cut = (8,) * slices if slices > 1 else ()
    return route(Decision(world, placed, (1,) * micros, schedule, token_slices=cut), graph(SKIPS))
