"""Which generation of ranks this is: the name under which all ranks that run now have their keys in the store.

A launcher's store may outlive its ranks, with addresses and heartbeats of ranks that are gone.  Our own launcher and
torchrun on one host count how often they started the ranks.  Under torchrun's elastic rendezvous each agent counts for
itself, and does not count changes of the members; so there rank 0 makes up a name and tells it to all.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from autopart.ir.errors import WorkerError
from autopart.launcher import restart_count
from autopart.runtime.activity import waiting

POLL_S = 0.01


def generation(store: Store, rank: int, size: int, limit_s: float, look: Callable[[], None]) -> str:
    """Return the name of this generation, alike on all ranks.  Collective under torchrun.

    Raises WorkerError within limit_s seconds, naming a rank that did not come, and what `look` raises."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or "AUTOPART_PARENT" in os.environ:
        return str(restart_count())
    meeting = PrefixStore("autopart/generations", store)
    if rank == 0:
        return _told(meeting, size, limit_s, look)
    ticket = uuid.uuid4().hex
    meeting.set(f"asked/{rank}", ticket)
    poll(lambda: [] if meeting.check([f"told/{ticket}"]) else [0], limit_s, look)
    name = meeting.get(f"told/{ticket}").decode()
    meeting.set(f"came/{name}/{rank}", "")
    return name


def _told(meeting: Store, size: int, limit_s: float, look: Callable[[], None]) -> str:
    """Make up a name and tell every rank that asks, until all ranks have got it.

    A ticket may be that of a rank that is gone; the one that follows it writes another one in its place."""
    name, answered = uuid.uuid4().hex, dict.fromkeys(range(1, size), "")

    def missing() -> list[int]:
        left = [rank for rank in answered if not meeting.check([f"came/{name}/{rank}"])]
        for rank in left:
            if meeting.check([f"asked/{rank}"]):
                ticket = meeting.get(f"asked/{rank}").decode()
                if ticket != answered[rank]:
                    answered[rank] = ticket
                    meeting.set(f"told/{ticket}", name)
        return left

    poll(missing, limit_s, look)
    return name


def poll(missing: Callable[[], list[int]], limit_s: float, look: Callable[[], None], peer: int | None = None) -> None:
    """Wait until no rank is missing.  peer: the one that is waited for, None for all."""
    end = time.monotonic() + limit_s
    with waiting(peer):
        while left := missing():
            look()
            if time.monotonic() > end:
                raise WorkerError(
                    f"rank {left[0]} did not come to open the process group",
                    why=f"it had {limit_s:g} s",
                    fix="look for the first error on that rank; every rank calls compile (or verify) in the same "
                    "order; timeout= of compile allows more time",
                )
            time.sleep(POLL_S)
