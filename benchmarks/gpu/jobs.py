"""The description of one row of the table, which every rank runs, and the answer of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopart.ir.cluster import Cluster

PRECISIONS = ("fp32", "bf16", "bf16-parameters")
"""fp32, autocast to bf16, and parameters in bf16."""


class CannotRun(Exception):
    """Raised when a combination is impossible: known on every rank before anything is sent."""


@dataclass(frozen=True)
class Job:
    """One row of the table.

    model, scale, tiny, rows: arguments of `workloads.workload`. plan: a name of `plans.PLANS`. precision: one of
    `PRECISIONS`. kind: "cuda" or "cpu". transport: "nccl" or "gloo", of messages between GPUs. cluster: what to plan
    for, None for the cluster of the launcher. micro_batches: None leaves the number to the planner; other plans use
    `default_micros`. costs: as for `compile`. warmup: steps before the measured ones; repeats: measured steps.
    references: known losses of one process, by the rows of its micro-batches.
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
        """A readable name."""
        return f"{self.model}, {self.plan}, {self.precision}"


def default_micros(rows: int, world: int) -> int:
    """Return the default number of micro-batches: four per stage, or the next smaller divisor of the batch.

    A micro-batch has at least two rows.
    """
    return max(count for count in range(1, max(2, min(rows // 2, 4 * world) + 1)) if rows % count == 0)


def reason(error: BaseException) -> str:
    """Return an error in one line: its type and text, the reason of an autopart error, and the last cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "what", "") or (str(error).strip().splitlines() or [""])[0]
    why = (getattr(error, "why", "") or "").splitlines()
    text_and_why = ": ".join([text, *why[:1]])
    return f"{type(error).__name__}: {text_and_why}"[:300]


FOLLOWED = "another rank failed"
Answer = dict[str, Any]
"""A rank's result of a row as JSON values, or {"reason": ...}; "stays": whether all ranks gave the same reason."""
