"""The table of actions: what each kind is and who meets in it, and how an action is written.

Actions print and parse:  2F0 forward of micro-batch 0 on stage 2;  2B0 its backward, or in two parts 2I0, the
gradients of what the stage received, and 2W0, those of its weights;  2SF0>3 send its activations to stage 3;  3RF0<2
receive them;  3SB0>2 send their gradients back;  2RB0<3 receive those;  2R sum the gradients of a stage over its
replicas;  2T sum the gradients of parameters that several stages use;  2G gather the new values of parameters from the
replicas that updated them;  0A exchange losses and failures among all ranks;  2O the optimizer step.  In asynchronous
training 2U3 sums the gradients of the micro-batches up to 3 over the replicas of stage 2, and updates its weights.  A
slice of a sequence follows the micro-batch: 2F0.1 is the second slice of micro-batch 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopart.ir.errors import ProgramError

COMPUTE, SEND, RECEIVE, COLLECTIVE, LOCAL, UPDATE = "compute", "send", "receive", "collective", "local", "update"
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


ALONE, PAIR, REPLICAS, OWNERS, TIED, ALL = "alone", "pair", "replicas", "owners", "tied", "all"
"""The ranks that take part in an action: one; sender and receiver; the replicas of a stage; those of a stage that share
the optimizer state; the ranks of all stages that are linked by tied parameters; every rank."""


@dataclass(frozen=True, slots=True)
class ActionKind:
    """One kind of action.

    role: compute, send, receive, collective, local or update.  way: forward or backward, or weights for a compute whose
    results stay where they are; an action once a step is forward if programs without a backward have it too.  label:
    what it does, in words.  needs: the kind of action on the same slot that must be over first; for an action at the
    end of a step, on every slot of all stages that take part.  A collective that needs nothing begins a step.  frees:
    what the slot no longer holds afterwards: "activations", "gradients" or "".  meets: the ranks that take part
    (`Program.groups`).  part_of: the compute that this one does a part of; what needs that compute on the same slot
    needs the part that goes the same way, and what needs it on every slot needs the part that frees what it frees.
    """

    role: str
    way: str
    label: str
    needs: str = ""
    frees: str = ""
    meets: str = ALONE
    part_of: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it has a peer."""
        return self.role in (SEND, RECEIVE)

    @property
    def is_per_slot(self) -> bool:
        """Whether it belongs to one micro-batch (and slice), and does not happen once a step."""
        return self.role in (COMPUTE, SEND, RECEIVE, UPDATE)


ACTIONS: dict[str, ActionKind] = {
    "F": ActionKind(COMPUTE, FORWARD, "forward"),
    "B": ActionKind(COMPUTE, BACKWARD, "backward", needs="F", frees="activations"),
    "I": ActionKind(COMPUTE, BACKWARD, "backward of inputs", needs="F", part_of="B"),
    "W": ActionKind(COMPUTE, WEIGHTS, "backward of weights", needs="I", frees="activations", part_of="B"),
    "SF": ActionKind(SEND, FORWARD, "sending activations", needs="F", meets=PAIR),
    "RF": ActionKind(RECEIVE, FORWARD, "receiving activations", meets=PAIR),
    "SB": ActionKind(SEND, BACKWARD, "sending gradients", needs="B", frees="gradients", meets=PAIR),
    "RB": ActionKind(RECEIVE, BACKWARD, "receiving gradients", meets=PAIR),
    "U": ActionKind(UPDATE, "", "summing gradients and updating weights", needs="B", meets=REPLICAS),
    "G": ActionKind(COLLECTIVE, FORWARD, "gathering new values of parameters", meets=OWNERS),
    "T": ActionKind(COLLECTIVE, BACKWARD, "summing tied gradients", needs="B", meets=TIED),
    "R": ActionKind(COLLECTIVE, BACKWARD, "summing gradients over replicas", needs="B", meets=REPLICAS),
    "A": ActionKind(COLLECTIVE, FORWARD, "agreeing on losses and failures", needs="B", meets=ALL),
    "O": ActionKind(LOCAL, "", "optimizer step", needs="B"),
}
"""The one table of actions; those that happen once a step are in the order of the program."""

OPTIMIZER = "O"
HOLDING: Mapping[str, tuple[int, int]] = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
"""By how many slots a compute changes those of its stage that keep activations, and those that keep what W needs."""


def begins_step(kind: str) -> bool:
    """Return whether an action is before the computes of its stages: a collective that needs nothing."""
    return ACTIONS[kind].role == COLLECTIVE and not ACTIONS[kind].needs


def register_action(name: str, kind: ActionKind) -> None:
    """Add a collective to the table: it runs at the end of a step, before losses and failures are exchanged.

    Register it on every rank before a program is made; `runtime.sums.reduce.COLLECTIVES` holds the function that a rank
    runs for it.  Raises ProgramError for a name that is taken or not one upper-case letter, and for other kinds of
    action.
    """
    if name in ACTIONS or not (len(name) == 1 and name.isascii() and name.isupper()):
        raise ProgramError(f"an action cannot be called {name!r}", fix="choose an upper-case letter that is free")
    if kind.role != COLLECTIVE or kind.meets in (ALONE, PAIR) or kind.needs not in COMPUTES.values():
        why = "it must be a collective of several ranks that needs every forward or every backward"
        raise ProgramError(f"action {name} cannot be added to the table", why=why)
    last = {other: ACTIONS.pop(other) for other in ("A", OPTIMIZER)}
    ACTIONS.update({name: kind, **last})


COMPUTES = {kind.way: name for name, kind in ACTIONS.items() if kind.role == COMPUTE and not kind.part_of}
SENDS = {kind.way: name for name, kind in ACTIONS.items() if kind.role == SEND}
RECEIVES = {kind.way: name for name, kind in ACTIONS.items() if kind.role == RECEIVE}
"""The kind of compute (done as a whole), send and receive of each way: COMPUTES[FORWARD] is "F"."""


def hands_on(kind: str) -> str:
    """Return the whole compute whose messages may follow this action; "" if none may."""
    row = ACTIONS[kind]
    return COMPUTES.get(row.way, "") if row.role == COMPUTE else ""


def completes(kind: str) -> str:
    """Return the whole compute that is over, with all that it does, after this compute; "" if a part is left."""
    row = ACTIONS[kind]
    return kind if not row.part_of else row.part_of if row.frees else ""


IN_FLIGHT = {
    name: -1 if kind.frees else int(not kind.part_of) for name, kind in ACTIONS.items() if kind.role == COMPUTE
}
"""By how many a compute changes the number of slots in flight on its stage."""


_TEXT = re.compile(r"(\d+)([A-Z]+)(?:(\d+)(?:\.(\d+))?)?(?:([<>])(\d+))?$")


class Slot(NamedTuple):
    """One micro-batch, or one slice of its sequences, on one stage: the key of all state during a step.

    micro: -1 for actions that happen once a step.  A tuple, since every action looks slots up several times, and
    hashing a dataclass takes five times as long.
    """

    stage: int
    micro: int = -1
    slice: int = 0

    def __str__(self) -> str:
        if self.micro < 0:
            return f"stage {self.stage}"
        sliced = f", slice {self.slice}" if self.slice else ""
        return f"stage {self.stage}, micro-batch {self.micro}{sliced}"

    def on(self, stage: int) -> Slot:
        """Return the slot of the same micro-batch and slice on another stage."""
        return Slot(stage, self.micro, self.slice)


class Action(NamedTuple):
    """One action of the ranks of a stage.  peer: the other stage of a message, else None."""

    kind: str
    slot: Slot
    peer: int | None = None

    @property
    def stage(self) -> int:
        """The stage that runs it."""
        return self.slot.stage

    @property
    def micro(self) -> int:
        """Its micro-batch, -1 if it happens once a step."""
        return self.slot.micro

    @property
    def is_a(self) -> ActionKind:
        """The properties of its kind."""
        return ACTIONS[self.kind]

    @property
    def other_end(self) -> Action:
        """The receive of a send, or the send of a receive."""
        ends = RECEIVES if self.is_a.role == SEND else SENDS
        assert self.peer is not None
        return Action(ends[self.is_a.way], self.slot.on(self.peer), self.stage)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}"
        if self.micro >= 0:
            text += str(self.micro)
        if self.slot.slice:
            text += f".{self.slot.slice}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.is_a.role == SEND else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """Parse the text of `str(action)`.  Raises ProgramError."""
    found = _TEXT.match(text.strip())
    if not found or found[2] not in ACTIONS:
        raise ProgramError(f"{text!r} is not an action", why="actions look like 2F0, 2SF0>3, 3RF0<2, 2T")
    stage, name, micro, piece, arrow, peer = found.groups()
    kind = ACTIONS[name]
    if arrow != {SEND: ">", RECEIVE: "<"}.get(kind.role) or (micro is not None) != kind.is_per_slot:
        why = "a send has >peer, a receive has <peer, others have neither; what happens once a step has no micro-batch"
        raise ProgramError(f"{text!r} is not an action", why=why)
    slot = Slot(int(stage), -1 if micro is None else int(micro), int(piece or 0))
    return Action(name, slot, None if peer is None else int(peer))
