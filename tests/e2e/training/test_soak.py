"""Long runs do not accumulate memory, file descriptors or threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs.step_jobs import ALL, compiled, fresh
from support.workers import Workers


@dataclass(frozen=True)
class Held:
    """Resources of a process. resident: bytes."""

    resident: int
    descriptors: int
    threads: int


def held() -> Held:
    """Return the resources of this process now."""
    proc = Path("/proc/self")
    resident = int(proc.joinpath("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(resident, len(list(proc.joinpath("fd").iterdir())), len(list(proc.joinpath("task").iterdir())))


def soaked(name: str, steps: int, options: dict[str, Any]) -> list[Held]:
    """Train and return the resources after each tenth of the steps.

    Batches have three sizes, and an evaluation and a state dict follow each tenth.
    """
    case, seen = ALL[name], []
    with compiled(case, fresh(name), case.batch(6), **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        for number in range(steps):
            pipe.step(case.batch(6 - number % 3))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (number + 1) % (steps // 10) == 0:
                pipe.eval_loss(case.batch(4))
                pipe.state_dict()
                seen.append(held())
    return seen


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs /proc to read the resources of a process"
)
GROWTH_BYTES = 1 << 20
"""Allowed growth over a thousand steps: a leak of a kilobyte per step is detected."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("replicas", [1, 2])
def test_two_thousand_steps_hold_no_more_memory_descriptors_or_threads(replicas):
    options = {"stages": 2, "replicas": replicas, "micro_batches": 2}
    with Workers(2 * replicas, timeout=1700) as pool:
        every = pool.run(soaked, "tied", 2000, options)
    for seen in every:
        half, last = seen[4], seen[-1]
        assert last.resident - half.resident < GROWTH_BYTES, seen
        assert (last.descriptors, last.threads) == (half.descriptors, half.threads), seen
