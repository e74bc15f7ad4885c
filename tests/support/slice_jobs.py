"""Steps over slices of sequences, on every rank of a worker pool, each held against one process."""

from __future__ import annotations

from typing import Any

import torch

from support.one_process import Difference, difference
from support.step_jobs import EVERY, compiled, expected_of, fresh


def sliced(
    name: str,
    lengths: tuple[int, ...],
    stages: int,
    schedule: str,
    micros: int,
    rows: int,
    dtype_name: str = "float64",
    without: tuple[str, ...] = (),
) -> tuple[float, Difference | None, str]:
    """One training step in slices.  without: keys of the batch to leave out.  Every rank returns its loss and what it
    played, rank 0 how far off the step was."""
    dtype, case = getattr(torch, dtype_name), EVERY[name]
    batch = {key: value for key, value in case.data(rows, dtype).items() if key not in without}
    options: dict[str, Any] = {"stages": stages, "schedule": schedule, "micro_batches": micros}
    with compiled(case, fresh(name, dtype), batch, token_slices=lengths, **options) as pipe:
        assert pipe.plan.decision.token_slices == lengths
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
        played = str(pipe.program)
        evaluated = pipe.eval_loss(batch).item()  # whole sequences
        assert abs(evaluated - loss) <= 1e-6 * abs(loss)
    if not leads:
        return loss, None, played
    return loss, difference(loss, found, state, expected_of(name, dtype, rows, 1, without), dtype), played
