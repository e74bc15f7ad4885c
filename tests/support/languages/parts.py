"""Programs as text, by rank."""

from __future__ import annotations

from autopart.ir.actions import Action, parse_action
from autopart.ir.program import Program


def parts_text(program: Program) -> str:
    """Return a line for each rank with its actions in order."""
    return "\n".join(" ".join(map(str, part)) for part in program.parts(range(program.world)))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse actions separated by blanks or lines, as `str(program)` writes them."""
    return tuple(parse_action(word) for word in text.split())
