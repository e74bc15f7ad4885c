"""Variants that take turns, step by step, on all ranks at once: what drifts in a machine meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


@dataclass(frozen=True)
class Turns(Generic[Result]):
    """Of each variant, by round: seconds until all ranks were done, and what the step gave here."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)


def taking_turns(steps: Mapping[str, Callable[[], Result]], rounds: int, warmup: int = 2) -> Turns[Result]:
    """Every variant once a round, after some rounds for warming up; who comes first changes from round to round."""
    names = list(steps)
    turns: Turns[Result] = Turns({name: [] for name in names}, {name: [] for name in names})
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            result = steps[name]()
            dist.barrier()
            if number >= warmup:
                turns.seconds[name].append(time.perf_counter() - began)
                turns.results[name].append(result)
    return turns
