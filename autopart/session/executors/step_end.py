"""The exchange that ends a step: once every rank has done its part, all know the loss and what each has spent on it.

Gradients and buffers are kept only then, so a step that fails on one rank counts on none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autopart.runtime.group.world import World

TOLD = 64
"""Ranks that report their computing time in each step; more take turns."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What all ranks know of a step.

    loss: of the whole batch, 0-dim on the CPU.  finite: whether it is.  not_finite: a gradient that is not finite, with
    its rank; "" if none is.  computed_ns: nanoseconds that each rank computed for when it last told, 0 where it was not
    measured; () between, as ranks take turns."""

    loss: torch.Tensor
    finite: bool
    not_finite: str
    computed_ns: tuple[float, ...]


class StepEnds:
    """The ends of the steps of one executor.  dtype: of the loss."""

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self._world, self._dtype = world, dtype
        self._computed: list[float] = []

    def end(self, loss: float, not_finite: str | None, computed_ns: int) -> StepEnd:
        """Tell all ranks that this one has done its part, and return what they know then.  Collective; O(log(ranks)).

        loss: of this rank, 0 where none is computed.  not_finite: a gradient on this rank."""
        world, first = self._world, len(self._computed)
        turn = range(first, min(first + TOLD, world.size))
        times = [float(computed_ns) if rank == world.rank else 0.0 for rank in turn]
        overflow, *times, total = world.reduce_numbers([float(not_finite is not None), *times], [loss])
        self._computed += times
        computed: tuple[float, ...] = ()
        if len(self._computed) == world.size:
            computed, self._computed = tuple(self._computed), []
        known = torch.tensor(total, dtype=self._dtype), math.isfinite(total)
        if not overflow:
            return StepEnd(*known, "", computed)
        names = world.gather_objects(not_finite)
        named = next(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)
        return StepEnd(*known, named, computed)
