"""What this rank is, what it does now and for whom it waits, in memory that others can read at any time.

A launcher hands a rank a `SharedStatus` that it can still read after the rank was killed (`publish_to`); without one,
as under torchrun, it lies in the process itself.  The heartbeat tells the other ranks (`runtime.watch`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

LABEL_BYTES, NOTE_BYTES = 64, 192
NOBODY, EVERYONE = 0, -1
"""What `SharedStatus.waits` says besides 1 + the rank that is waited for."""


class Phase(IntEnum):
    """How a rank that is waited for is judged.

    BUSY: it has the time limit to go on.  PATIENT: planning or capturing, which takes as long as it takes.  AWAY: it
    has returned or left, and nothing more will come from it.  JOINING: as BUSY; it opens the group, to which whoever is
    away may come back.
    """

    BUSY = 0
    PATIENT = 1
    AWAY = 2
    JOINING = 3


class SharedStatus(ctypes.Structure):
    """The status of one rank: which stage it is (label) and what it is doing (note), in UTF-8; for whom it waits
    (waits: 1 + rank, NOBODY or EVERYONE); its `Phase`; and a number that changes with every action."""

    _fields_ = (
        ("label", ctypes.c_char * LABEL_BYTES),
        ("note", ctypes.c_char * NOTE_BYTES),
        ("waits", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("changes", ctypes.c_uint32),
    )
    label: bytes
    note: bytes
    waits: int
    phase: int
    changes: int


_status = SharedStatus()


def publish_to(status: SharedStatus | None) -> None:
    """From now on this process writes its label and notes to `status`, or, for None, to memory of its own."""
    global _status
    _status = status if status is not None else SharedStatus()


def current() -> SharedStatus:
    """The status that this process writes."""
    return _status


def set_rank_label(text: str) -> None:
    """Name this rank's place, as "stage 1", in messages about it."""
    _status.label = _truncated(text, LABEL_BYTES)


def set_activity(text: str, phase: Phase = Phase.BUSY) -> None:
    """Say what this rank does now, as "1F0 forward of micro-batch 0": named if it dies.  Costs well below 2 µs."""
    _status.note = _truncated(text, NOTE_BYTES)
    _status.phase = phase
    _status.changes += 1


def leave() -> None:
    """Nothing more comes from this rank; what it did last stays to be read."""
    _status.phase, _status.waits = Phase.AWAY, NOBODY
    _status.changes += 1


@contextmanager
def patient(text: str) -> Iterator[None]:
    """The body is planning or capturing: others wait for it without a limit."""
    before, phase = _status.note, Phase(_status.phase)
    set_activity(text, Phase.PATIENT)
    try:
        yield
    finally:
        set_activity(before.decode("utf-8", "ignore"), phase)


class waiting:
    """The body waits for a rank, None for all others.  One object may be used again and again, not nested."""

    def __init__(self, rank: int | None = None) -> None:
        self._waits = EVERYONE if rank is None else rank + 1

    def __enter__(self) -> None:
        _status.changes += 1
        _status.waits = self._waits

    def __exit__(self, kind: Any = None, error: BaseException | None = None, trace: Any = None) -> None:
        _status.waits = NOBODY


def text_of(raw: bytes) -> str:
    """A label or a note as text."""
    return raw.decode("utf-8", "ignore")


def _truncated(text: str, size: int) -> bytes:
    """At most size - 1 bytes, so that the terminating zero fits."""
    return text.encode("utf-8", "replace")[: size - 1]
