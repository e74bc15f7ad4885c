"""Long runs that record the resources of each process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.jobs.step_jobs import ALL, compiled, fresh


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
