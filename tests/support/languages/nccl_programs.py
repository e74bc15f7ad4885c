"""Message programs of two to four ranks and whether NCCL runs them or hangs.

Communicator A carries what rank 0 sends to rank 1, B the other direction, and P both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopart.passes.program.nccl_rules import RECEIVED, SENT, Collective, Item, MessageEnd, Post, Wait

FINE, HANG, WRONG = "fine", "hang", "wrong"


@dataclass(frozen=True)
class Case:
    """A message program.

    queues: items of each rank; members: ranks of each communicator; connected: all communicators were used before;
    outcome: when all operations of a rank are serialized.
    """

    queues: tuple[tuple[Item, ...], ...]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"P": (0, 1)})
    connected: bool = True
    outcome: str = FINE


def to(peer: int, message: str) -> MessageEnd:
    return MessageEnd(SENT, peer, message)


def of(peer: int, message: str) -> MessageEnd:
    return MessageEnd(RECEIVED, peer, message)


def one(comm: str, *ends: MessageEnd) -> tuple[Item, ...]:
    """Return posts of one end each, in order."""
    return tuple(Post(comm, (end,)) for end in ends)


def batch(comm: str, *ends: MessageEnd) -> tuple[Item, ...]:
    """Return one post of all ends."""
    return (Post(comm, ends),)


def _one_f_one_b(*, fused: bool) -> tuple[tuple[Item, ...], ...]:
    """Return three ranks in the steady state of 1F1B. fused: send and receive in one post, otherwise send first."""

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
    """Return four ranks that each post their receive from the previous rank before their send to the next.

    directed: one communicator per direction of a pair.
    """
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
    "each sends and receives in one post": Case(
        (batch("P", to(1, "a"), of(1, "b")), batch("P", to(0, "b"), of(0, "a")))
    ),
    "one receives first": Case((one("P", to(1, "a"), of(1, "b")), one("P", of(0, "a"), to(0, "b")))),
    "receives first, at the first use": Case(_RECEIVES_FIRST, AB, connected=False, outcome=HANG),
    "receives first": Case(_RECEIVES_FIRST, AB, outcome=HANG),
    "1F1B, fused": Case(_one_f_one_b(fused=True), PAIRS),
    "1F1B, send first": Case(_one_f_one_b(fused=False), PAIRS, outcome=HANG),
    "a group of three first used by two": Case(
        (batch("S", to(1, "a")), batch("S", of(0, "a")), ()), _S, connected=False, outcome=HANG
    ),
    "a group of three, after a sum of all": Case(
        ((Collective("S"), *batch("S", to(1, "a"))), (Collective("S"), *batch("S", of(0, "a"))), (Collective("S"),)),
        _S, connected=False,
    ),
    "a skip in one batch, at the first use": Case(_SKIP, _S, connected=False, outcome=HANG),
    "a skip in one batch": Case(_SKIP, _S),
    "a skip with one communicator per pair, at the first use": Case(
        (
            (*batch("01", to(1, "a")), *batch("02", to(2, "b"))),
            (*batch("01", of(0, "a")), *batch("12", to(2, "c"))),
            (*batch("02", of(0, "b")), *batch("12", of(1, "c"))),
        ),
        PAIRS, connected=False,
    ),
    "a ring on one communicator": Case(_ring(directed=False), {"S": (0, 1, 2, 3)}, outcome=HANG),
    "a ring on directed communicators": Case(
        _ring(directed=True), {f"{r}>{(r + 1) % 4}": (r, (r + 1) % 4) for r in range(4)}, outcome=HANG
    ),
    "a sum before the message another rank needs first": Case(
        ((Collective("T"), *one("P", to(1, "a"))), (*one("P", of(0, "a")), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)}, outcome=HANG,
    ),
    "a sum that waits for a message sent after it": Case(
        ((Collective("T"), *one("P", to(1, "a"))), (*one("P", of(0, "a")), Wait("P", 0, "a"), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)}, outcome=HANG,
    ),
    "a sum after the messages": Case(
        ((*one("P", to(1, "a")), Collective("T")), (*one("P", of(0, "a")), Collective("T"))),
        {"P": (0, 1), "T": (0, 1)},
    ),
    "different messages": Case((batch("P", to(1, "a")), batch("P", of(0, "b"))), outcome=WRONG),
    "posted on one end only": Case((batch("P", to(1, "a")), ()), outcome=HANG),
}  # fmt: skip
"""Programs by description."""
