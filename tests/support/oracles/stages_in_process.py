"""Plans with stages cut by hand, and functions of benchmarks/shared/in_process.py that run them in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Plan, Provenance, Stage, check
from benchmarks.shared.in_process import CPU, Replayed, inputs_of, replay

__all__ = ["CPU", "Replayed", "inputs_of", "plan_for", "replay", "slices"]


def plan_for(
    graph: Graph,
    parts: Sequence[Iterable[str]],
    micros: int = 1,
    schedule: str = "1f1b",
    recompute: Mapping[int, Sequence[Iterable[str]]] | None = None,
) -> Plan:
    """Return a checked plan with these ops in each stage. recompute: groups of ops by stage."""
    place = {op.name: i for i, op in enumerate(graph.ops)}

    def ordered(ops: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(ops), key=place.__getitem__))

    groups = recompute or {}
    stages = tuple(Stage(ordered(ops), (s,), tuple(map(ordered, groups.get(s, ())))) for s, ops in enumerate(parts))
    provenance = Provenance(graph.shape_digest(), graph.structure_digest(), torch.__version__)
    return check(Plan(provenance, Decision(len(stages), stages, (graph.rows,) * micros, schedule)), graph)


def slices(graph: Graph, bounds: Sequence[int]) -> list[list[str]]:
    """Return the ops in captured order, cut before the given positions."""
    ends = [0, *sorted(bounds), len(graph.ops)]
    return [[op.name for op in graph.ops[a:b]] for a, b in pairwise(ends)]
