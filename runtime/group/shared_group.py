"""The process group that all worlds of this process share, and the watch over its ranks.

The last world that leaves destroys the group, as does the first one that comes after it was broken.  A group that
other code opened is never broken nor destroyed: worlds then use another one of their own.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from autopart.ir.errors import UsageError
from autopart.launcher import restart_count
from autopart.runtime.activity import JOINING, set_activity
from autopart.runtime.group.rendezvous import (
    UNWATCHED,
    launchers_store,
    meet_beside,
    open_default_group,
    rank0_has_store,
)
from autopart.runtime.watch.monitor import Monitor

TIMEOUT_VARIABLE = "AUTOPART_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 600.0
_TAG = 1 << 20
"""The tag of a message that is never sent."""


def default_timeout_s() -> float:
    """Return the seconds that a rank waits for others that do not go on, if `timeout=` is not given."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_TIMEOUT_S
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UsageError(f"{TIMEOUT_VARIABLE} is {text!r}", fix="set it to a number of seconds above 0, or unset it")


os.register_at_fork(after_in_child=gc.freeze)
"""A process that this one forks, such as a worker of a DataLoader, never collects what it was born with: a group that
was garbage here would wait, while it is destroyed, for threads that the other process does not have."""


def break_group(group: dist.ProcessGroup) -> None:
    """Let everything that waits in this group raise, on all threads and ranks.  May be called from any thread; takes
    milliseconds.

    NCCL's communicators are aborted.  Gloo has no such call, but a receive that times out closes all connections of its
    group, in every thread that waits in one, and the peers see them closed."""
    with suppress(RuntimeError):
        group.abort()
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            overdue = group.recv([torch.empty(1)], peer, _TAG)
        except RuntimeError:  # this connection is closed already, or Gloo is not in this group
            continue
        with suppress(RuntimeError):
            overdue.wait(timedelta(milliseconds=1))
        return


class _SharedGroup:
    """The group, used by worlds that hold a lease: the number of the opening, so that leases of earlier ones end
    nothing."""

    def __init__(self) -> None:
        self._opening = 0
        self._breakers: list[Callable[[], None]] = []
        self._foreign = self._broken = False
        self._group: dist.ProcessGroup | None = None
        self.backend = ""
        self.monitor: Monitor | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        assert self._group is not None
        return self._group

    def enter(self, backend: str, limit_s: float, planning_s: float, breaker: Callable[[], None]) -> int:
        """Open the group unless it is open, and return a lease.  Collective if it is not open.

        limit_s: seconds that a rank may wait for others; planning_s: for others that plan or capture.  breaker: breaks
        the groups that the world adds.
        """
        set_activity("opening the process group", JOINING)
        if self._breakers and (self._broken or not dist.is_initialized() or self._failed()):
            self._drop()
        if not self._breakers:
            self._open(backend, limit_s)
        if self.monitor is not None:
            self.monitor.limit_s, self.monitor.planning_s = limit_s, planning_s
        self._breakers.append(breaker)
        set_activity("preparing")
        return self._opening

    def _failed(self) -> bool:
        return self.monitor is not None and self.monitor.failed()

    def holds(self, lease: int) -> bool:
        """Whether the opening of a lease is still in use."""
        return lease == self._opening and bool(self._breakers)

    def leave(self, lease: int, breaker: Callable[[], None]) -> None:
        """Return a lease; the last one ends the group."""
        if not self.holds(lease):
            return
        self._breakers.remove(breaker)
        if not self._breakers:
            self._drop()

    def break_all(self) -> None:
        """End all waiting in these groups, on this and on other ranks.  May be called from any thread."""
        self._broken = True
        for breaker in list(self._breakers):
            breaker()
        if self._group is not None:
            break_group(self._group)

    def _open(self, backend: str, limit_s: float) -> None:
        self._opening += 1
        self._broken, self._foreign = False, dist.is_initialized()
        try:
            self.backend = backend
            name = self._beside(backend, limit_s) if self._foreign else self._alone(backend, limit_s)
        except BaseException:
            self._drop()
            raise
        if self.monitor is not None:
            self.monitor.enter(name, self.break_all)

    def _alone(self, backend: str, limit_s: float) -> str:
        """Open the default group, watched from before the start."""
        monitor = Monitor(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), limit_s)
        self.monitor = monitor
        store, rank, size = launchers_store(limit_s, monitor.require)
        monitor.attach(store, rank0_has_store=rank0_has_store())
        name = open_default_group(backend, store, rank, size, limit_s, monitor.require, monitor.opening)
        self._group = dist.group.WORLD
        return name

    def _beside(self, backend: str, limit_s: float) -> str:
        """Open a group beside the default group that other code opened, perhaps with another backend."""
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            self._group = dist.group.WORLD
            return ""
        store = dist.distributed_c10d._get_default_store()
        self.monitor = Monitor(rank, size, limit_s)
        self.monitor.attach(store, rank0_has_store=rank0_has_store(), life=restart_count())
        name = meet_beside(store, rank, size, limit_s, self.monitor.require)
        self._group = dist.new_group(list(range(size)), timeout=UNWATCHED, backend=backend)
        return name

    def _drop(self) -> None:
        """End the group and the watch."""
        self._opening += 1
        self._breakers.clear()
        group, self._group = self._group, None
        if dist.is_initialized() and group is not None:
            with suppress(ValueError, AssertionError):
                if not self._foreign:
                    dist.destroy_process_group()
                elif group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.stop()


shared_group = _SharedGroup()
