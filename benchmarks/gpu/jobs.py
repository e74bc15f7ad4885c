"""What one row of the table asks of every rank, and what a rank answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopart.ir.cluster import Cluster

PRECISIONS = ("fp32", "bf16", "bf16-parameters")
"""The model as it is, under autocast, and with its parameters in that type."""


class CannotRun(Exception):
    """Why a combination is none: known before anything is sent, on every rank alike."""


@dataclass(frozen=True)
class Job:
    """One row.

    model, scale, tiny, rows: as `workloads.workload` takes them.  plan: a name of `ways.WAYS`.  precision: one of
    `PRECISIONS`.  kind: "cuda" or "cpu".  transport: "nccl" or "gloo", of messages between GPUs.  cluster: what is
    planned for, None for what the launcher says.  micro_batches: None leaves them to the planner, others take
    `default_micros`.  costs: as `compile` takes them.  warmup, repeats: steps before those that count, and those.
    references: losses of the plain model that are known already, by the rows of its micro-batches.
    """

    model: str
    plan: str
    precision: str
    kind: str
    world: int
    local: int
    scale: float = 1.0
    tiny: bool = False
    rows: int | None = None
    micro_batches: int | None = None
    transport: str = "nccl"
    cluster: Cluster | None = None
    costs: str = "auto"
    warmup: int = 3
    repeats: int = 10
    references: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As a person would say it."""
        return f"{self.model}, {self.plan}, {self.precision}"


def default_micros(rows: int, world: int) -> int:
    """Micro-batches where nobody chooses: four for each stage, or the next fewer that divides the batch, of two rows at
    least."""
    return max(count for count in range(1, max(2, min(rows // 2, 4 * world) + 1)) if rows % count == 0)


def reason(error: BaseException) -> str:
    """An error in one line of a table: what it is, and of ours also why; the last cause, where torch names one."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "what", "") or (str(error).strip().splitlines() or [""])[0]
    why = (getattr(error, "why", "") or "").splitlines()
    said = ": ".join([text, *why[:1]])
    return f"{type(error).__name__}: {said}"[:300]


FOLLOWED = "another rank failed"
Answer = dict[str, Any]
"""What a rank says of a row: plain numbers and words, {"reason": ...} for none, "stays": whether all ranks said so."""
