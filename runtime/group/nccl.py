"""Messages between CUDA devices over NCCL, without a wait of the host in a step.

One communicator for each pair of ranks, used only through batches, so that torch never makes another one beside it.
It is made and used in both directions before the first step: at its first message in a direction a communicator holds
up the host until the peer is there, and no time limit of torch's covers that.

Sends are posted under the stream of the computes, whose results they carry.  A receive by itself is posted under a
stream of its own, so that it does not wait for computes that were issued before it and run still.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopart.ir.program import Action
from autopart.runtime.activity import set_activity, waiting
from autopart.runtime.group.shared_group import shared_group
from autopart.runtime.watch.launcher import end_process

if TYPE_CHECKING:
    from autopart.runtime.group.world import World

SPARE_S = 15.0
"""For so long after the time limit the watch over the ranks may still end an opening in its own way."""


class NcclCarrier:
    """One rank's end of all communicators."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._device = world.device
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._posting = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def open_pair(self, low: int, high: int) -> None:
        """Make the communicator of a pair, and send a byte in both directions."""
        group = self._world.pair_group(low, high)
        if self._world.rank not in (low, high):
            return
        peer = low + high - self._world.rank
        self._groups[peer] = group
        with _deadline(f"opening the channel between ranks {low} and {high}"), waiting(peer):
            byte, back = (torch.zeros(1, dtype=torch.uint8, device=self._device) for _ in range(2))
            for work in self._batch(peer, [byte], [back]):
                work.wait()
            torch.cuda.synchronize(self._device)

    def open_group(self, group: dist.ProcessGroup) -> None:
        """Make the communicator by a sum."""
        ranks = dist.get_process_group_ranks(group)
        with _deadline(f"opening the group of ranks {', '.join(map(str, ranks))}"), waiting():
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
            torch.cuda.synchronize(self._device)

    def post(
        self, peer: int, sends: Sequence[tuple[Action, torch.Tensor]], receives: Sequence[tuple[Action, int]]
    ) -> NcclPosted:
        """Post them as one batch.  The host does not wait."""
        computing = torch.cuda.current_stream(self._device)
        stream = computing if sends else self._posting
        with torch.cuda.stream(stream):
            buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _, size in receives]
            works = self._batch(peer, [tensor for _, tensor in sends], buffers)
        return NcclPosted(works, tuple(buffers), foreign=stream != computing)

    def _batch(self, peer: int, sends: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
        group = self._groups[peer]
        ops = [dist.P2POp(dist.isend, tensor, peer, group) for tensor in sends]
        ops += [dist.P2POp(dist.irecv, buffer, peer, group) for buffer in buffers]
        works: list[dist.Work] = dist.batch_isend_irecv(ops)
        return works


class NcclPosted:
    """A batch.  foreign: its buffers belong to another stream than that of the computes."""

    def __init__(self, works: list[dist.Work], received: tuple[torch.Tensor, ...], *, foreign: bool) -> None:
        self._works = works
        self._foreign = foreign
        self.received = received

    def wait(self) -> None:
        """Let the current stream wait; the host goes on.  Called again it does nothing."""
        for work in self._works:
            work.wait()
        if self._works and self._foreign:
            for buffer in self.received:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        self._works = []


@contextmanager
def _deadline(doing: str) -> Iterator[None]:
    """The body may hold up the host in NCCL for ever: then, some seconds behind the watch, which may be held up as
    well, a thread says what was being opened and ends the process."""
    set_activity(doing)
    monitor = shared_group.monitor
    limit_s = (monitor.limit_s if monitor is not None else 600.0) + SPARE_S
    why = f"rank {os.environ.get('RANK', '0')} ends: {doing} took longer than {limit_s - SPARE_S:g} s"
    timer = threading.Timer(limit_s, end_process, (why,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        set_activity("preparing")
