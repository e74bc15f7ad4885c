"""When it is computed: what each rank does in one step, in order.

Actions print and parse:  2F0 forward of micro-batch 0 on stage 2;  2B0 its backward;  2SF0>3 send its activations to
stage 3;  3RF0<2 receive them;  3SB0>2 send their gradients back;  2RB0<3 receive those;  2T sum the gradients of
parameters that several stages use.  In timelines also  2R sum the gradients of a stage over its replicas;  2O the
optimizer's step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopart.ir.errors import ProgramError

KINDS = ("F", "B", "SF", "RF", "SB", "RB", "T")
ENDS = ("R", "O")
"""What follows the last backward of a stage and is no action of a program yet: only timelines hold it."""
_TEXT = re.compile(r"(\d+)(SF|RF|SB|RB|F|B)(\d+)(?:([<>])(\d+))?$|(\d+)([TRO])$")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does.  peer: the other stage of a message, or None.  micro is -1 for T, R and O."""

    kind: str
    stage: int
    micro: int = -1
    peer: int | None = None

    def __str__(self) -> str:
        if self.micro < 0:
            return f"{self.stage}{self.kind}"
        text = f"{self.stage}{self.kind}{self.micro}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind[0] == 'S' else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; raises ProgramError."""
    found = _TEXT.match(text.strip())
    if not found:
        raise ProgramError(f"{text!r} is no action")
    stage, kind, micro, arrow, peer, t_stage, t_kind = found.groups()
    if t_kind:
        return Action(t_kind, int(t_stage))
    sends = kind[0] == "S"
    message = len(kind) == 2
    if message != (arrow is not None) or (message and sends != (arrow == ">")):
        raise ProgramError(f"{text!r} is no action", why="a send has >peer, a receive has <peer, F and B have neither")
    return Action(kind, int(stage), int(micro), int(peer) if peer is not None else None)


@dataclass(frozen=True, slots=True)
class Edge:
    """What flows from one stage to a later one for each micro-batch, as one message.

    values: names in a fixed order.  grads: those of them whose gradients come back.
    """

    src: int
    dst: int
    values: tuple[str, ...]
    grads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """ranks[r]: all that rank r does in one step.  stage_ranks[s]: the rank of stage s.  tied: parameter name and
    the stages that use it, for every trainable parameter that several stages use; the first of them owns it."""

    micros: int
    stage_ranks: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    edges: tuple[Edge, ...] = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        return "\n".join(" ".join(str(a) for a in actions) for actions in self.ranks)


def parse_actions(text: str) -> tuple[tuple[Action, ...], ...]:
    """One line per rank, actions separated by blanks: the inverse of `str(program)` for `Program.ranks`."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in text.split("\n"))
