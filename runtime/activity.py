"""What this rank is, what it does and for whom it waits, in memory that others can read at any time.

A launcher gives a rank a `SharedStatus` that it can still read after the rank was killed (`publish_to`); without one,
as under torchrun, the status lies in the process itself.  The heartbeat sends it to the other ranks (`runtime.watch`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

LABEL_BYTES, NOTE_BYTES = 64, 192
NOBODY, EVERYONE = 0, -1
"""Values of `SharedStatus.waits` beside 1 + the rank that is waited for."""
BUSY, PATIENT, AWAY, JOINING = range(4)
"""Values of `SharedStatus.phase`, by which a rank that others wait for is judged.

BUSY: it has the time limit to go on.  PATIENT: it plans or captures, without that limit.  AWAY: it returned or left,
and sends nothing more.  JOINING: as BUSY; it opens the group, to which ranks that are away may return.
"""
NOTHING, READY_TO_KEEP, KEEPING = range(3)
"""Values of `SharedStatus.keeping`.  READY_TO_KEEP: the rank would write its state to memory.  KEEPING: it writes."""


class SharedStatus(ctypes.Structure):
    """The status of one rank: its stage (label) and activity (note) in UTF-8, the rank that it waits for (1 + rank,
    NOBODY or EVERYONE), its phase, and a number that changes with every action.

    asked: set by the launcher, to ask the ranks to stop so that others can join; heeded: set by the rank when its
    script has learned that.  keeping: NOTHING, or what of its state the rank would keep if another one were lost."""

    _fields_ = (
        ("label", ctypes.c_char * LABEL_BYTES),
        ("note", ctypes.c_char * NOTE_BYTES),
        ("waits", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("changes", ctypes.c_uint32),
        ("asked", ctypes.c_int32),
        ("heeded", ctypes.c_int32),
        ("keeping", ctypes.c_int32),
    )
    label: bytes
    note: bytes
    waits: int
    phase: int
    changes: int
    asked: int
    heeded: int
    keeping: int


_status = SharedStatus()


def publish_to(status: SharedStatus | None) -> None:
    """Let this process write its status to `status`, or, for None, to memory of its own."""
    global _status
    _status = status if status is not None else SharedStatus()


def current() -> SharedStatus:
    """Return the status that this process writes."""
    return _status


def set_rank_label(text: str) -> None:
    """Set the name of this rank's place in messages, such as "stage 1"."""
    _status.label = encoded(text, LABEL_BYTES)


def set_activity(text: str | bytes, phase: int = BUSY) -> None:
    """Set what this rank does, such as "1F0: forward of micro-batch 0", for errors about it.  Takes less than 2 µs.

    text: bytes are taken as they are (`encoded`)."""
    _status.note = text if isinstance(text, bytes) else encoded(text)
    _status.phase = phase
    _status.changes += 1


def leave() -> None:
    """Mark this rank as away; its last activity stays readable."""
    _status.phase, _status.waits = AWAY, NOBODY
    _status.changes += 1


@contextmanager
def patient(text: str) -> Iterator[None]:
    """Note that the body plans or captures, for which others wait without a limit."""
    before, phase = _status.note, _status.phase
    set_activity(text, PATIENT)
    try:
        yield
    finally:
        set_activity(text_of(before), phase)


def waiting(rank: int | None = None) -> AbstractContextManager[None]:
    """Note that the body waits for a rank, or for all others.  The context may be entered many times, not nested."""
    return _Waiting(EVERYONE if rank is None else rank + 1)


class _Waiting:
    def __init__(self, waits: int) -> None:
        self._waits = waits

    def __enter__(self) -> None:
        _status.changes += 1
        _status.waits = self._waits

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _status.waits = NOBODY


def encoded(text: str, size: int = NOTE_BYTES) -> bytes:
    """Return an activity as `set_activity` keeps it: at most size - 1 bytes, so that the terminating zero fits."""
    return text.encode("utf-8", "replace")[: size - 1]


def text_of(raw: bytes) -> str:
    """Decode a label or a note."""
    return raw.decode("utf-8", "ignore")
