"""Numbers as people read them; the exact ones stand beside them in the page."""

from __future__ import annotations

from typing import NamedTuple

from autopart.ir.errors import printable


class Cell(NamedTuple):
    """A cell of a table.  text: shown.  exact: the number that it stands for, or None for words.  share: length of its
    bar, 0 to 1, or None."""

    text: str
    exact: float | None = None
    share: float | None = None


def words(text: object) -> Cell:
    """Return a cell of words."""
    return Cell(printable(str(text)))


def count(number: float) -> Cell:
    """Return a cell of a whole number."""
    return Cell(f"{number:,}", number)


def duration(ns: float) -> Cell:
    """Return a cell of nanoseconds."""
    return Cell(duration_text(ns), ns)


def duration_text(ns: float) -> str:
    """Write nanoseconds in the largest unit in which they are at least 1."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(ns) >= size:
            return f"{ns / size:.{2 if abs(ns) < 100 * size else 1}f} {unit}"
    return f"{ns:.0f} ns"


def memory(size_bytes: float, share: float | None = None) -> Cell:
    """Return a cell of bytes."""
    return Cell(memory_text(size_bytes), size_bytes, share)


def memory_text(size_bytes: float) -> str:
    """Write bytes in the largest binary unit in which they are at least 1."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= size:
            return f"{size_bytes / size:.{2 if size_bytes < 100 * size else 1}f} {unit}"
    return f"{size_bytes:.0f} B"


def part(share: float) -> Cell:
    """Return a cell of a share between 0 and 1."""
    return Cell(f"{share:.1%}", share, max(0.0, min(1.0, share)))


def change(now: float, before: float) -> Cell:
    """Return a cell that says by how much a number differs from one before."""
    return Cell(f"{now / before - 1:+.1%}", now / before - 1) if before else words("")
