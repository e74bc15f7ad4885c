"""Variants that alternate step by step on all ranks at once, so that machine drift affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


@dataclass(frozen=True)
class Alternation(Generic[Result]):
    """Measurements of each variant by round: seconds until all ranks were done, and this rank's result."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)


def alternate(steps: Mapping[str, Callable[[], Result]], rounds: int, warmup: int = 2) -> Alternation[Result]:
    """Run every variant once per round after some warm-up rounds. The first variant changes from round to round."""
    names = list(steps)
    measured: Alternation[Result] = Alternation({name: [] for name in names}, {name: [] for name in names})
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            result = steps[name]()
            dist.barrier()
            if number >= warmup:
                measured.seconds[name].append(time.perf_counter() - began)
                measured.results[name].append(result)
    return measured
