"""Schedules from outside for any placement of stages on workers, with backwards whole and split: a list scheduler that
draws what each worker does next, importable on the ranks of a pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from autopart.passes.program.schedules import register

LOOP, FOLDED = "loop", "folded"
"""Placements: every worker gets each of its stages after as many others as there are workers; or the stages go from the
first worker to the last and back, like a V."""

Order = list[list[str]]


def homes_of(placement: str, stages: int, workers: int) -> list[int]:
    """Return the worker of each stage."""
    return [
        workers - 1 - stage % workers if placement == FOLDED and stage // workers % 2 else stage % workers
        for stage in range(stages)
    ]


def drawn_order(homes: Sequence[int], micros: int, split: float, seed: int) -> Order:
    """Return a random order of computes that can be played: each worker runs one of those whose needs are over.

    split: the probability that a backward is split.  Every list of ready computes is in a fixed order, so the same
    seed gives the same order on every rank.
    """
    draw = random.Random(seed)
    stages, last = len(homes), len(homes) - 1
    parts = {(s, m): draw.random() < split for s in range(stages) for m in range(micros)}
    over: set[tuple[str, int, int]] = set()
    orders: Order = [[] for _ in range(max(homes) + 1)]

    def ready(worker: int) -> list[tuple[str, int, int]]:
        found = []
        for stage in (s for s in range(stages) if homes[s] == worker):
            for micro in range(micros):
                if ("F", stage, micro) not in over:
                    if stage == 0 or ("F", stage - 1, micro) in over:
                        found.append(("F", stage, micro))
                elif ("back", stage, micro) not in over:
                    if stage == last or ("back", stage + 1, micro) in over:
                        found.append(("I" if parts[stage, micro] else "B", stage, micro))
                elif parts[stage, micro] and ("W", stage, micro) not in over:
                    found.append(("W", stage, micro))
        return found

    while any(choices := [ready(worker) for worker in range(len(orders))]):
        for worker, found in enumerate(choices):
            if found:
                kind, stage, micro = turn = draw.choice(found)
                orders[worker].append(f"{stage}{kind}{micro}")
                over.add(turn)
                if kind in "IB":
                    over.add(("back", stage, micro))
    return orders


def registered(placement: str, workers: int, split: float = 1.0, seed: int = 0) -> str:
    """Register the orders that are drawn with this seed, and return the name of their schedule."""

    def order(stages: int, micros: int) -> Order:
        return drawn_order(homes_of(placement, stages, workers), micros, split, seed)

    return register(order, f"drawn {placement} {workers} {split} {seed}").name


def of_texts(texts: Callable[[int, int], Order], name: str) -> str:
    """Register a function of (stages, micro-batches) and return the name of its schedule."""
    return register(texts, name).name
