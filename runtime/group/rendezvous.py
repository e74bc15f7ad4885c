"""The rendezvous of the ranks: they open the default process group, any number of times in the life of a process.

Each opening has a number, which rank 0 takes from the store and tells the others.  Ranks do not count themselves, so
the numbers agree even if some ranks failed before an opening that others waited for.  Each opening has keys of its own,
since those of an earlier group hold addresses that are no longer in use.

A launcher's store may outlive its ranks, with addresses and heartbeats of ranks that are gone, so all keys of the ranks
that run now are under the name of their generation.  Our own launcher and torchrun on one host count how often they
started the ranks.  Under torchrun's elastic rendezvous each agent counts for itself, and does not count changes of the
members; so there rank 0 makes up a name and tells it to all.

Keys are polled and not waited for in torch, so that the watch over the ranks (`runtime.watch`) can end the waiting.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from autopart.ir.errors import ClusterError, WorkerError
from autopart.launcher import restart_count
from autopart.runtime.activity import waiting

POLL_S = 0.01
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
    number = _told(meeting, rank, size, lambda: str(meeting.add("openings", 1)), limit_s, look)
    numbered(number)
    own = PrefixStore(f"autopart/{number}", store)
    with waiting():
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=UNWATCHED)
    return number


def meet_beside(store: Store, rank: int, size: int, limit_s: float, look: Look) -> str:
    """Wait until every rank has come to open a group beside one that other code opened; return a name of the opening,
    alike on all ranks.  Collective.  Raises what `open_default_group` raises: torch would wait there for days."""
    return _told(PrefixStore("autopart/beside", store), rank, size, lambda: uuid.uuid4().hex, limit_s, look)


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
        name = str(restart_count())
        if "TORCHELASTIC_RUN_ID" in os.environ and "AUTOPART_PARENT" not in os.environ:
            meeting = PrefixStore("autopart/generations", store)
            name = _told(meeting, rank, size, lambda: uuid.uuid4().hex, limit_s, look)
        _found[address] = PrefixStore(f"gen{name}", store), rank, size
    return _found[address]


def _connected(host: str, port: int, rank: int, limit_s: float, look: Look) -> Store:
    limit = timedelta(seconds=limit_s)
    if rank == 0 and rank0_has_store():
        try:
            return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=limit)
        except (RuntimeError, TypeError) as error:
            raise ClusterError(
                f"rank 0 cannot open the store of the run at {host}:{port}",
                why=(str(error).splitlines() or [""])[0],
                fix="give each run on a host a port of its own (MASTER_PORT; torchrun --standalone finds one); "
                "MASTER_ADDR is an address of the host of rank 0",
            ) from error
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
        fix="look for the first error there; MASTER_ADDR and MASTER_PORT say where, alike on every rank",
    )


def _told(meeting: Store, rank: int, size: int, made: Callable[[], str], limit_s: float, look: Look) -> str:
    """Return, on all ranks, the word that rank 0 makes up when it comes.  Collective.

    The others ask with a new ticket each, so that none reads an answer to an earlier request.  A ticket may be that of
    a rank that is gone or gave up; the next one writes another in its place, so rank 0 answers until all have come.
    Raises WorkerError, naming a rank that did not come within limit_s seconds, and what `look` raises."""
    if rank:
        ticket = uuid.uuid4().hex
        meeting.set(f"asked/{rank}", ticket)
        _await_all(lambda: [] if meeting.check([f"told/{ticket}"]) else [0], limit_s, look)
        word = meeting.get(f"told/{ticket}").decode()
        meeting.set(f"came/{word}/{rank}", "")
        return word
    word, answered = made(), dict.fromkeys(range(1, size), "")

    def missing() -> list[int]:
        for rank in [rank for rank in answered if meeting.check([f"came/{word}/{rank}"])]:
            del answered[rank]  # asked of the store no more
        for rank in answered:
            if meeting.check([f"asked/{rank}"]):
                ticket = meeting.get(f"asked/{rank}").decode()
                if ticket != answered[rank]:
                    answered[rank] = ticket
                    meeting.set(f"told/{ticket}", word)
        return list(answered)

    _await_all(missing, limit_s, look)
    return word


def _await_all(missing: Callable[[], list[int]], limit_s: float, look: Look) -> None:
    """Wait until no rank is missing, for the first of them at a time."""
    left = missing()
    while left:
        first, end = left[0], time.monotonic() + limit_s
        with waiting(first):
            while left[:1] == [first]:
                look()
                if time.monotonic() > end:
                    raise WorkerError(
                        f"rank {first} did not come to open the process group",
                        why=f"it had {limit_s:g} s",
                        fix="look for the first error on that rank; every rank calls compile (or verify) in the same "
                        "order; timeout= of compile allows more time",
                    )
                time.sleep(POLL_S)
                left = missing()
