"""Schedules from outside for any placement of stages on workers, with backwards whole and split: a list scheduler that
draws what each worker does next, importable on the ranks of a pool."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopart.passes.program.orders import Schedule, placed
from autopart.passes.program.schedules import register

Order = list[list[str]]


@dataclass
class _Drawing:
    """Computes that are over while an order is drawn.  split: whether the backward of a (stage, micro-batch) is."""

    homes: Sequence[int]
    micros: int
    split: dict[tuple[int, int], bool]
    over: set[tuple[str, int, int]] = field(default_factory=set)

    def next_of(self, stage: int, micro: int) -> str:
        """Return the kind of compute that can run on a slot now, "" if none can.  Forwards run in order, since the next
        micro-batch sees the buffers that a forward updates."""
        if ("F", stage, micro) not in self.over:
            has_inputs = stage == 0 or ("F", stage - 1, micro) in self.over
            return "F" if has_inputs and (micro == 0 or ("F", stage, micro - 1) in self.over) else ""
        if ("back", stage, micro) not in self.over:
            ready = stage == len(self.homes) - 1 or ("back", stage + 1, micro) in self.over
            return ("I" if self.split[stage, micro] else "B") if ready else ""
        return "W" if self.split[stage, micro] and ("W", stage, micro) not in self.over else ""

    def choices(self, worker: int) -> list[tuple[str, int, int]]:
        """Return what a worker can run now."""
        own = [
            (stage, micro) for stage, home in enumerate(self.homes) if home == worker for micro in range(self.micros)
        ]
        return [(kind, *slot) for slot in own if (kind := self.next_of(*slot))]


def drawn_order(homes: Sequence[int], micros: int, split: float, seed: int) -> Order:
    """Return a random order of computes that can be played: each worker runs one of those whose needs are over.

    split: the probability that a backward is split.  The same seed gives the same order on every rank.
    """
    draw = random.Random(seed)
    slots = itertools.product(range(len(homes)), range(micros))
    state = _Drawing(homes, micros, {slot: draw.random() < split for slot in slots})
    orders: Order = [[] for _ in range(max(homes) + 1)]
    while any(choices := [state.choices(worker) for worker in range(len(orders))]):
        for worker, found in enumerate(choices):
            if found:
                kind, stage, micro = draw.choice(found)
                orders[worker].append(f"{stage}{kind}{micro}")
                state.over |= {(kind, stage, micro), ("back" if kind in "IB" else kind, stage, micro)}
    return orders


def registered(placement: str, workers: int, split: float = 1.0, seed: int = 0) -> str:
    """Register the orders that are drawn with this seed, and return the name of their schedule."""

    def order(stages: int, micros: int) -> Order:
        return drawn_order(placed(placement, stages, workers) or range(stages), micros, split, seed)

    return register(order, f"drawn {placement} {workers} {split} {seed}").name


def weights_last(stages: int, micros: int) -> Order:
    """Return an order for one worker that runs all stages: all backwards of weights at the end, stage by stage, and
    micro-batches the other way round in every other stage."""
    forward = [f"{stage}F{micro}" for micro in range(micros) for stage in range(stages)]
    inputs = [f"{stage}I{micro}" for micro in range(micros) for stage in reversed(range(stages))]
    weights = [f"{stage}W{micro}" for stage in range(stages) for micro in range(micros)[:: -1 if stage % 2 else 1]]
    return [[*forward, *inputs, *weights]]


def out_of_order(stages: int, micros: int) -> Order:
    """Return an order for one worker that runs all stages on the last micro-batch first."""
    slots = [(stage, micro) for micro in reversed(range(micros)) for stage in range(stages)]
    return [[*(f"{stage}F{micro}" for stage, micro in slots), *(f"{s}B{m}" for s, m in reversed(slots))]]


OWN = {
    schedule.name: schedule
    for schedule in (
        Schedule("weights last", weights_last),
        Schedule("out of order", out_of_order),
    )
}
"""Schedules for one worker."""
