"""How a pipeline's gradients and buffers differ from those of one process, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from autopart.ir.explain import table_lines

TITLES = ["name", "of", "stage", "norm", "relative error", "verdict"]
WORDS = ("name", "of", "verdict")


def difference_lines(rows: Iterable[tuple[str, str, int, float, float, str]]) -> list[str]:
    """The lines of the table, its header first.

    rows: for each gradient or buffer its name, which of the two it is, the stage that has it (-1 for none), its norm in
    one process, the norm of the difference over that, and the verdict.
    """
    grid = [TITLES]
    for name, kind, stage, norm, error, verdict in rows:
        grid.append([name, kind, str(stage) if stage >= 0 else "-", f"{norm:.3e}", f"{error:.1e}", verdict])
    return table_lines(grid, [TITLES.index(title) for title in WORDS])
