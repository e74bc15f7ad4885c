"""Programs as text, by rank."""

from __future__ import annotations

from autopart.ir.program import Program


def parts_text(program: Program) -> str:
    """Return a line for each rank with its actions in order."""
    return "\n".join(" ".join(map(str, part)) for part in program.parts(range(program.world)))
