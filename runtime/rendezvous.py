"""How the ranks find each other to open the default process group, any number of times in the life of a process.

Each opening has a number of its own, which rank 0 takes from the store and tells the others: no rank counts for
itself, so that the numbers agree even when some ranks failed before an opening that others waited for.  Under the keys
of a group that was left, ranks would find addresses where nobody listens.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from autopart.ir.errors import WorkerError

_found: dict[tuple[str, str], tuple[Store, int, int]] = {}
"""The store of a launcher, with this process's rank and the world's size, by the launcher's address and port: a launch
that ran and left its group may be followed by another one with a store of its own."""


def open_default_group(backend: str, timeout: timedelta) -> None:
    """Open the default process group of torch.distributed.  Collective.

    Raises WorkerError, within `timeout`, naming a rank that did not come.
    """
    store, rank, size = launchers_store(timeout)
    meeting = PrefixStore("autopart", store)
    number = _lead(meeting, size, timeout) if rank == 0 else _follow(meeting, rank, timeout)
    own = PrefixStore(f"autopart/{number}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)


def launchers_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store that the launcher says in the environment, this process's rank and the number of ranks."""
    address = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if address not in _found:
        _found.clear()  # of a launch that is over
        _found[address] = next(rendezvous("env://", timeout=timeout))
    return _found[address]


def _lead(meeting: Store, size: int, timeout: timedelta) -> int:
    """Rank 0: number the opening and answer every rank that waits for it."""
    number = int(meeting.add("openings", 1))
    for rank in range(1, size):
        request = f"waiting/{rank}"
        _wait(meeting, request, timeout, missing=rank)
        ticket = meeting.get(request).decode()
        meeting.delete_key(request)
        meeting.set(f"ticket/{ticket}", str(number))
    return number


def _follow(meeting: Store, rank: int, timeout: timedelta) -> int:
    """Another rank: ask with a new ticket, so that an answer to an earlier, abandoned request is never read."""
    ticket = uuid.uuid4().hex
    request = f"waiting/{rank}"
    meeting.set(request, ticket)
    try:
        _wait(meeting, f"ticket/{ticket}", timeout, missing=0)
    except WorkerError:
        with suppress(RuntimeError):
            meeting.delete_key(request)
        raise
    return int(meeting.get(f"ticket/{ticket}"))


def _wait(meeting: Store, key: str, timeout: timedelta, missing: int) -> None:
    try:
        meeting.wait([key], timeout)
    except RuntimeError as error:
        raise WorkerError(
            f"rank {missing} did not come to open the process group",
            why=(str(error).splitlines() or ["no reason given"])[0],
            fix="look for the first error on that rank; every rank calls compile (or verify) in the same order",
        ) from error
