"""The heartbeat of one rank: its status, sent every second through the store by which the ranks found each other.

One thread makes all calls to the store, so that no other thread blocks if the store does not answer.  It reads the
status of other ranks only while this rank waits, and only of those that decide whether it can go on
(`states.looked_at`): one or two, or the chain of ranks that wait for each other.

One store serves 16,384 ranks that all wait.  Each takes 6 µs of it a second for its heartbeat, and 37 µs for a reading:
12 for asking whether there is a cause, 25 for a few heartbeats in one request (64 of them: 35).  A reading comes every
`STORE_S` times the number of ranks: 2 s, which is (6 + 37 / 2) µs * 16,384 = 0.4 s of the store a second.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from autopart.runtime import activity
from autopart.runtime.watch.processes import state_of, this_machine

BEAT_S, READ_S = 1.0, 0.25
STORE_S = 120e-6
"""Seconds between two readings for each rank of the group: with many ranks all read less often."""
LAST_S, LOOK_S = 5.0, 0.02
"""Seconds for which rank 0 waits for the others at the end, and between two looks."""
FORGET_S = 3.0
"""Seconds without reading a rank after which what was read before is out of date."""


@dataclass
class Seen:
    """The last heartbeat of another rank, when (time.monotonic()) it and the activity in it last changed, and when it
    was last read."""

    beat: Mapping[str, Any]
    beat_at: float
    same_at: float
    read_at: float


class Heart:
    """Sends heartbeats until `stop`.

    wanted: the ranks to read.  seen: what was read.  cause: why a rank of the group failed."""

    def __init__(self, store: Store, rank: int, size: int, life: int) -> None:
        """life: number of the restart of the ranks, where the store has keys of earlier ones."""
        self._store = PrefixStore(f"autopart/watch/{life}", store.clone())  # type: ignore[attr-defined]
        self._rank, self._size = rank, size
        self._read_s = max(READ_S, size * STORE_S)
        self._forget_s = max(FORGET_S, 3 * self._read_s)
        self._machine, self._beats, self._phase = this_machine(), 0, activity.BUSY
        self._group = ""
        self._report: tuple[str, str] | None = None
        self._reported = threading.Event()
        self._question: threading.Event | None = None
        self._wake = threading.Event()
        self._ending = False
        self._asked_at: float | None = None
        self._read_at = time.monotonic()
        self.lost = False
        self.curious = False
        self.wanted: Collection[int] = ()
        self.seen: dict[int, Seen] = {}
        self._absent: frozenset[int] = frozenset()
        self.cause: Mapping[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="autopart-heartbeat", daemon=True)
        self._thread.start()

    # -- for other threads ---------------------------------------------------------------------------------------

    def enter(self, group: str) -> None:
        """Report and read failures of this group."""
        self._group, self.cause = group, None

    def tell(self, cause: Mapping[str, Any], patience_s: float = 5.0) -> None:
        """Report why this rank failed, unless another rank did so first; wait until that is written."""
        if not self._group or self.lost:
            return
        self._reported.clear()
        self._report = self._group, json.dumps(cause)
        self._wake.set()
        self._reported.wait(patience_s)

    def failed(self, patience_s: float = 5.0) -> bool:
        """Whether the store now has a failure of the group; also sends a heartbeat."""
        self._question = answered = threading.Event()
        self._wake.set()
        answered.wait(patience_s)
        return self.cause is not None

    def hurry(self) -> None:
        """Read the store now."""
        self.curious = True
        self._wake.set()

    def knows(self, rank: int) -> bool:
        """Whether the last readings were also of this rank, if only to find that it sent no heartbeat yet."""
        seen = self.seen.get(rank)
        return rank in self._absent if seen is None else self._read_at - seen.read_at <= self._forget_s

    def stuck_s(self) -> float:
        """Return for how long the store has not answered."""
        asked = self._asked_at
        return time.monotonic() - asked if asked is not None else 0.0

    def stop(self) -> None:
        """Send a last heartbeat."""
        self._ending = True
        self._wake.set()
        self._thread.join(1.0)

    def await_others(self) -> None:
        """Wait until the other ranks have sent their last heartbeat: the store ends with this process, and theirs would
        fail then, which torch prints in many lines."""
        end, left = time.monotonic() + LAST_S, [rank for rank in range(self._size) if rank != self._rank]
        while left and not self.lost and time.monotonic() < end:
            left = [rank for rank in left if not self._gone(rank)]
            time.sleep(LOOK_S if left else 0.0)

    def _gone(self, rank: int) -> bool:
        """Whether a rank sends nothing more, or cannot."""
        if not self._store.check([f"beat/{rank}"]):
            return False
        beat = json.loads(self._store.get(f"beat/{rank}"))
        ended = beat["machine"] == self._machine and state_of(beat["pid"]) == "gone"
        return bool(beat["phase"] == activity.AWAY or ended)

    # -- in its own thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at = 0.0
        while not self.lost:
            self._wake.clear()
            question, self._question = self._question, None
            ending, now = self._ending, time.monotonic()
            self._asked_at = now
            try:
                if self._report is not None:
                    group, cause = self._report
                    self._store.compare_set(f"cause/{group}", "", cause)
                    self._report = None
                    self._reported.set()
                news = self._phase != activity.current().phase  # such as the end of a capture
                if ending or news or question is not None or now - beat_at >= BEAT_S:
                    self._beat()
                    beat_at = now
                self._read_cause()
                if self.curious:
                    self._read()
            except Exception:  # the process that holds the store has ended
                self.lost = True
            self._asked_at = None
            if question is not None:
                question.set()
            if ending:
                return
            self._wake.wait(self._read_s if self.curious else max(BEAT_S / 2, self._read_s))

    def _beat(self) -> None:
        status, self._beats = activity.current(), self._beats + 1
        self._phase = status.phase
        beat = {
            "beat": self._beats, "pid": os.getpid(), "machine": self._machine, "label": activity.text_of(status.label),
            "note": activity.text_of(status.note), "waits": status.waits, "phase": status.phase,
            "changes": status.changes,
        }  # fmt: skip
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _read_cause(self) -> None:
        group = self._group
        key = f"cause/{group}"
        if group and self.cause is None and self._store.check([key]):
            cause = json.loads(self._store.get(key))
            if group == self._group:
                self.cause = cause

    def _read(self) -> None:
        wanted = [rank for rank in self.wanted if rank != self._rank]
        ranks = [rank for rank in wanted if rank in self.seen or self._store.check([f"beat/{rank}"])]
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        self._read_at = now = time.monotonic()
        self._absent = frozenset(wanted) - frozenset(ranks)
        for rank, text in zip(ranks, texts, strict=True):
            beat, before = json.loads(text), self.seen.get(rank)
            if before is None or now - before.read_at > self._forget_s:
                self.seen[rank] = Seen(beat, now, now, now)
                continue
            alive = beat["beat"] != before.beat["beat"] or beat["pid"] != before.beat["pid"]
            same = (beat["changes"], beat["waits"]) == (before.beat["changes"], before.beat["waits"])
            self.seen[rank] = Seen(beat, now if alive else before.beat_at, before.same_at if same else now, now)

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank had sent no heartbeat when it was read last."""
        return max(0.0, self.seen[rank].read_at - self.seen[rank].beat_at)
