"""PipeTransformer's elastic pipeline (He et al., ICML 2021, section 3), as its published code does it.

AutoPipe deals the sub-layers (attention, MLP) that still learn to K stages by their numbers of parameters; frozen ones
stay on the first stage and count nothing. K is halved while no stage then has more parameters than the largest one of
epoch 0. AutoDP gives the devices that become free to more replicas. M depends on K alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pvariance

MICRO_BATCHES = {8: 16, 4: 16, 2: 16, 1: 4}
"""Micro-batches of each pipeline by its number of stages: 2K, 4K, 8K, and 4."""


def balanced(sizes: Sequence[float], stages: int) -> list[int]:
    """Return how many sub-layers each stage gets, in order. sizes: millions of parameters of each sub-layer.

    A stage takes sub-layers while its sum stays below the mean of what is left for each stage plus their variance over
    the stages left; every stage gets one at least."""
    counts, place = [], 0
    for stage in range(stages - 1):
        left = stages - stage
        rest = sizes[place:]
        most = sum(rest) / left + pvariance(rest) / left
        taken, total = 1, sizes[place]
        while len(rest) - taken > left - 1 and total + rest[taken] < most:
            total += rest[taken]
            taken += 1
        counts.append(taken)
        place += taken
    return [*counts, len(sizes) - place]


def largest(sizes: Sequence[float], stages: int) -> float:
    """Return the parameters of the largest stage, in the unit of the sizes."""
    place, found = 0, 0.0
    for count in balanced(sizes, stages):
        found = max(found, sum(sizes[place : place + count]))
        place += count
    return found


def stages_for(sizes: Sequence[float], active: int, stages: int) -> int:
    """Return the length of the pipeline in which the last `active` sub-layers learn. stages: in epoch 0."""
    limit, rest = largest(sizes, stages), sizes[len(sizes) - active :]
    found = stages
    while found >= 2 and (found > len(rest) or largest(rest, found // 2) <= limit):
        found //= 2
    return found
