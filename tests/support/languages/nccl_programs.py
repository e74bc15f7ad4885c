"""Programs of messages that NCCL runs, or hangs on: what each rank does, and what has to come of it.

A is the communicator for what 0 sends 1, B that for what 1 sends 0; P is one for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopart.passes.program.nccl_rules import RECEIVED, SENT, Collective, Item, MessageEnd, Post, Wait

FINE, HANG, WRONG = "fine", "hang", "wrong"


@dataclass(frozen=True)
class Case:
    """queues: of each rank.  members: of each communicator.  connected: used before, all of them.  outcome: when
    everything on a rank takes turns."""

    queues: tuple[tuple[Item, ...], ...]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"P": (0, 1)})
    connected: bool = True
    outcome: str = FINE


def to(peer: int, message: str) -> MessageEnd:
    return MessageEnd(SENT, peer, message)


def of(peer: int, message: str) -> MessageEnd:
    return MessageEnd(RECEIVED, peer, message)


def one(comm: str, *ends: MessageEnd) -> tuple[Item, ...]:
    """Posted one after the other."""
    return tuple(Post(comm, (end,)) for end in ends)


def batch(comm: str, *ends: MessageEnd) -> tuple[Item, ...]:
    """Posted together."""
    return (Post(comm, ends),)


def _one_f_one_b(*, fused: bool) -> tuple[tuple[Item, ...], ...]:
    """Three ranks in the steady state: each sends on what it has and takes what comes, together or send first."""

    def meet(comm: str, send: MessageEnd, receive: MessageEnd) -> tuple[Item, ...]:
        return batch(comm, send, receive) if fused else one(comm, send, receive)

    return (
        (*one("01", to(1, "f0")), *meet("01", to(1, "f1"), of(1, "b0")), *one("01", of(1, "b1"))),
        (
            *one("01", of(0, "f0")), *meet("12", to(2, "g0"), of(2, "c0")),
            *meet("01", to(0, "b0"), of(0, "f1")), *meet("12", to(2, "g1"), of(2, "c1")),
            *one("01", to(0, "b1")),
        ),
        (*meet("12", to(1, "c0"), of(1, "g0")), *meet("12", to(1, "c1"), of(1, "g1"))),
    )  # fmt: skip


PAIRS = {"01": (0, 1), "12": (1, 2), "02": (0, 2)}
AB = {"A": (0, 1), "B": (0, 1)}
_RECEIVES_FIRST = (
    (*one("B", of(1, "b")), *one("A", to(1, "a"))),
    (*one("A", of(0, "a")), *one("B", to(0, "b"))),
)
_SKIP = (
    batch("S", to(1, "a"), to(2, "b")),
    (*one("S", of(0, "a")), *one("S", to(2, "c"))),
    batch("S", of(0, "b"), of(1, "c")),
)
_S = {"S": (0, 1, 2)}
_EACH = [range(4)[r - 1] for r in range(4)], [(r + 1) % 4 for r in range(4)]


def _ring(*, directed: bool) -> tuple[tuple[Item, ...], ...]:
    """Four ranks with several stages each: every one posts its receive from before it before its send behind it."""
    return tuple(
        (
            *one(f"{before}>{rank}" if directed else "S", of(before, f"m{before}")),
            *one(f"{rank}>{behind}" if directed else "S", to(behind, f"m{rank}")),
        )
        for rank, (before, behind) in enumerate(zip(*_EACH, strict=True))
    )


CASES = {
    "each sends, then receives": Case(
        (one("P", to(1, "a"), of(1, "b")), one("P", to(0, "b"), of(0, "a"))), outcome=HANG
    ),
    "the same, together": Case((batch("P", to(1, "a"), of(1, "b")), batch("P", to(0, "b"), of(0, "a")))),
    "one receives first": Case((one("P", to(1, "a"), of(1, "b")), one("P", of(0, "a"), to(0, "b")))),
    "receives first, at the first use": Case(_RECEIVES_FIRST, AB, connected=False, outcome=HANG),
    "receives first": Case(_RECEIVES_FIRST, AB, outcome=HANG),
    "1F1B, fused": Case(_one_f_one_b(fused=True), PAIRS),
    "1F1B, send first": Case(_one_f_one_b(fused=False), PAIRS, outcome=HANG),
    "a group of three, first used by two": Case(
        (batch("S", to(1, "a")), batch("S", of(0, "a")), ()), _S, connected=False, outcome=HANG
    ),
    "a group of three, after a sum of all": Case(
        ((Collective("S"), *batch("S", to(1, "a"))), (Collective("S"), *batch("S", of(0, "a"))), (Collective("S"),)),
        _S, connected=False,
    ),
    "a skip in one batch, at the first use": Case(_SKIP, _S, connected=False, outcome=HANG),
    "a skip in one batch": Case(_SKIP, _S),
    "a skip, peer by peer, at the first use": Case(
        (
            (*batch("01", to(1, "a")), *batch("02", to(2, "b"))),
            (*batch("01", of(0, "a")), *batch("12", to(2, "c"))),
            (*batch("02", of(0, "b")), *batch("12", of(1, "c"))),
        ),
        PAIRS, connected=False,
    ),
    "a ring on one communicator": Case(_ring(directed=False), {"S": (0, 1, 2, 3)}, outcome=HANG),
    "a ring on directed ones": Case(
        _ring(directed=True), {f"{r}>{(r + 1) % 4}": (r, (r + 1) % 4) for r in range(4)}, outcome=HANG
    ),
    "a sum before what another needs for it": Case(
        ((Collective("T"), *one("P", to(1, "a"))), (*one("P", of(0, "a")), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)}, outcome=HANG,
    ),
    "a sum that needs what is sent behind it": Case(
        ((Collective("T"), *one("P", to(1, "a"))), (*one("P", of(0, "a")), Wait("P", 0, "a"), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)}, outcome=HANG,
    ),
    "a sum behind the messages": Case(
        ((*one("P", to(1, "a")), Collective("T")), (*one("P", of(0, "a")), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)},
    ),
    "another message": Case((batch("P", to(1, "a")), batch("P", of(0, "b"))), outcome=WRONG),
    "posted on one end alone": Case((batch("P", to(1, "a")), ()), outcome=HANG),
}  # fmt: skip
"""By what they are about."""
