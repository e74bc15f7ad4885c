"""What this rank is and what it does now, in memory that whoever watches the process can read after it was killed.

A launcher hands a rank its `SharedStatus` with `publish_to`; without one, as under torchrun, notes go nowhere.
"""

from __future__ import annotations

import ctypes

LABEL_BYTES, NOTE_BYTES = 64, 192


class SharedStatus(ctypes.Structure):
    """The status of one rank: which stage it is (label) and what it is doing (note), in UTF-8."""

    _fields_ = (("label", ctypes.c_char * LABEL_BYTES), ("note", ctypes.c_char * NOTE_BYTES))
    label: bytes
    note: bytes


_status: SharedStatus | None = None


def publish_to(status: SharedStatus | None) -> None:
    """From now on this process writes its label and notes to `status`, or nowhere."""
    global _status
    _status = status


def set_rank_label(text: str) -> None:
    """Name this rank's place, as "stage 1", in messages about it."""
    if _status is not None:
        _status.label = _truncated(text, LABEL_BYTES)


def set_activity(text: str) -> None:
    """Say what this rank does now, as "1F0 forward of micro-batch 0": named if it dies.  Costs well below 2 µs."""
    if _status is not None:
        _status.note = _truncated(text, NOTE_BYTES)


def _truncated(text: str, size: int) -> bytes:
    """At most size - 1 bytes, so that the terminating zero fits."""
    return text.encode("utf-8", "replace")[: size - 1]
