"""Programs in tests: what each rank plays, as text."""

from __future__ import annotations

from autopart.ir.program import Program


def parts_text(program: Program) -> str:
    """A line for each rank: its part of the order."""
    return "\n".join(" ".join(map(str, part)) for part in program.parts(range(program.world)))
