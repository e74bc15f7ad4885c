"""How a pipeline's gradients and buffers differ from those of one process, as a table."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

TITLES = ("name", "of", "stage", "norm", "relative error", "verdict")
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in TITLES:
        table.add_column(title, justify="left" if title in WORDS else "right", no_wrap=True)
    for row in rows:
        stage = str(row.stage) if row.stage >= 0 else "-"
        table.add_row(row.name, row.of, stage, f"{row.norm:.3e}", f"{row.error:.1e}", row.verdict)
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, highlight=False, emoji=False, markup=False).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
