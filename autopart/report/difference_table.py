"""How a pipeline's gradients and buffers differ from those of one process, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopart.ir.explain import table_lines

TITLES = ["name", "of", "stage", "norm", "relative error", "verdict"]
WORDS = ("name", "of", "verdict")


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One gradient or buffer.  of: which of the two; stage: where the pipeline has it, -1 for nowhere; norm: in one
    process; error: norm of the difference over `norm`."""

    name: str
    of: str
    stage: int
    norm: float
    error: float
    verdict: str


def difference_lines(rows: Iterable[DifferenceRow]) -> list[str]:
    """The lines of the table, its header first."""
    grid = [TITLES]
    for row in rows:
        stage = str(row.stage) if row.stage >= 0 else "-"
        grid.append([row.name, row.of, stage, f"{row.norm:.3e}", f"{row.error:.1e}", row.verdict])
    return table_lines(grid, [TITLES.index(title) for title in WORDS])
