"""The rendezvous of the ranks: they open the default process group, any number of times in the life of a process.

Each opening has a number, which rank 0 takes from the store and sends to the others.  Ranks do not count themselves, so
the numbers agree even if some ranks failed before an opening that others waited for.  Each opening has keys of its own,
since those of an earlier group hold addresses that are no longer in use.

Keys are polled and not waited for in torch, so that the watch over the ranks (`runtime.watch`) can end the waiting.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autopart.ir.errors import ClusterError, WorkerError
from autopart.runtime.activity import waiting
from autopart.runtime.group.generations import POLL_S, generation, poll

UNWATCHED = timedelta(days=7)
"""The time limit of groups: the watch ends what hangs, and can tell planning from hanging."""
REFUSED_S = 2.0
"""Seconds for which a launcher's store, which starts before the ranks, may refuse connections until it counts as
gone."""
ANSWER_S = 2.0
"""Seconds for one attempt to connect to a store: torch retries internally and cannot be interrupted."""

Look = Callable[[], None]
"""Raises if waiting is pointless."""
_found: dict[tuple[str, str], tuple[Store, int, int]] = {}
"""The store of a launcher, this process's rank and the number of ranks, by the launcher's address and port, which
change if another launch follows in this process."""


def open_default_group(
    backend: str, store: Store, rank: int, size: int, limit_s: float, look: Look, numbered: Callable[[str], None]
) -> str:
    """Open the default process group of torch.distributed; return the number of the opening.  Collective.

    numbered: called with that number once it is known.  Raises WorkerError within limit_s seconds, naming a rank that
    did not come, and what `look` raises.
    """
    meeting = PrefixStore("autopart", store)
    number = _lead(meeting, size, limit_s, look) if rank == 0 else _follow(meeting, rank, limit_s, look)
    numbered(str(number))
    own = PrefixStore(f"autopart/{number}", store)
    with waiting():
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=UNWATCHED)
    return str(number)


def rank0_has_store() -> bool:
    """Whether the store is in the process of rank 0, and not in the launcher's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def launchers_store(limit_s: float, look: Look = lambda: None) -> tuple[Store, int, int]:
    """Return the store that the launcher names in the environment, this process's rank and the number of ranks.

    Raises WorkerError if the store does not answer within limit_s seconds, or its launcher is gone.
    """
    address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if address not in _found:
        _found.clear()  # of a launch that is over
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not address[0] or not address[1].isdigit():
            raise ClusterError(
                "the ranks cannot find each other",
                why="MASTER_ADDR or MASTER_PORT is not set",
                fix="let torchrun or autopart.launch start the ranks; both set them to the host and a port of rank 0",
            )
        store = _connected(address[0], int(address[1]), rank, limit_s, look)
        name = generation(store, rank, size, limit_s, look)
        _found[address] = PrefixStore(f"gen{name}", store), rank, size
    return _found[address]


def _connected(host: str, port: int, rank: int, limit_s: float, look: Look) -> Store:
    limit = timedelta(seconds=limit_s)
    if rank == 0 and rank0_has_store():
        return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=limit)
    start = time.monotonic()
    with waiting(0):
        while True:
            _await_listener(host, port, limit_s, look)
            try:
                brief = timedelta(seconds=min(limit_s, ANSWER_S))
                store = TCPStore(host, port, wait_for_workers=False, multi_tenant=True, timeout=brief)
            except RuntimeError as error:
                if time.monotonic() - start > limit_s:
                    raise _no_store(host, port, error) from error
            else:
                store.set_timeout(limit)
                return store


def _await_listener(host: str, port: int, limit_s: float, look: Look) -> None:
    """Wait until a process listens there."""
    start = time.monotonic()
    patience_s = limit_s if rank0_has_store() else min(limit_s, REFUSED_S)
    while True:
        look()
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() - start > patience_s:
                raise _no_store(host, port, error) from error
            time.sleep(5 * POLL_S)


def _no_store(host: str, port: int, error: Exception) -> WorkerError:
    who = "rank 0, which holds" if rank0_has_store() else "the launcher, which holds"
    return WorkerError(
        f"{who} the store at {host}:{port}, did not come or is gone",
        why=(str(error).splitlines() or [""])[0],
        fix="look for the first error there",
    )


def _lead(meeting: Store, size: int, limit_s: float, look: Look) -> int:
    """Number the opening, on rank 0, and answer every rank that waits for it."""
    number = int(meeting.add("openings", 1))
    for rank in range(1, size):
        request = f"waiting/{rank}"
        _wait(meeting, request, limit_s, look, missing=rank)
        ticket = meeting.get(request).decode()
        meeting.delete_key(request)
        meeting.set(f"ticket/{ticket}", str(number))
    return number


def _follow(meeting: Store, rank: int, limit_s: float, look: Look) -> int:
    """Ask rank 0 for the number, with a new ticket, so that an answer to an earlier, abandoned request is never
    read."""
    ticket = uuid.uuid4().hex
    request = f"waiting/{rank}"
    meeting.set(request, ticket)
    try:
        _wait(meeting, f"ticket/{ticket}", limit_s, look, missing=0)
    except BaseException:
        with suppress(RuntimeError):
            meeting.delete_key(request)
        raise
    return int(meeting.get(f"ticket/{ticket}"))


def _wait(meeting: Store, key: str, limit_s: float, look: Look, missing: int) -> None:
    poll(lambda: [] if meeting.check([key]) else [missing], limit_s, look, missing)
