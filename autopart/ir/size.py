"""The size of a micro-batch: rows, and tokens of each row."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.ir.errors import GraphError


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a micro-batch.

    rows: entries along the batch axis, at least 1.  tokens: entries along the sequence axis; None: whole sequences of
    any length.
    """

    rows: int
    tokens: int | None = None

    def __str__(self) -> str:
        """Return a text such as "1 row" or "4 rows of 128 tokens"."""
        rows = _many(self.rows, "row")
        return rows if self.tokens is None else f"{rows} of {_many(self.tokens, 'token')}"


def check(size: Size) -> Size:
    """Check that there is at least one row, and one token if tokens are counted.  Raises GraphError."""
    for name, count in (("rows", size.rows), ("tokens", size.tokens)):
        if count is not None and (type(count) is not int or count < 1):
            raise GraphError(f"a size has {count!r} {name}", why="it needs at least one")
    return size


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
