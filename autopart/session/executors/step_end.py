"""The exchange that ends a step: once every rank has done its part, all know the loss and what each has spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopart.runtime.group.world import World


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What all ranks know of a step.

    loss: of the whole batch.  not_finite: a gradient that is not finite, with its rank; "" if there is none.
    computed_ns: nanoseconds that each rank computed for, 0 where it was not measured."""

    loss: float
    not_finite: str
    computed_ns: tuple[float, ...]


def end_step(world: World, losing: Sequence[int], loss: float, not_finite: str | None, computed_ns: int) -> StepEnd:
    """Tell all ranks that this one has done its part, and return what all have told.  Collective.

    losing: the ranks that computed losses.  loss: of this rank, 0 elsewhere.  not_finite: a gradient on this rank."""
    everyone = world.gather_numbers([loss, float(not_finite is not None), float(computed_ns)])
    total = sum(everyone[rank][0] for rank in losing)
    computed = tuple(row[2] for row in everyone)
    if not any(row[1] for row in everyone):
        return StepEnd(total, "", computed)
    names = world.gather_objects(not_finite)
    first = next(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)
    return StepEnd(total, first, computed)
