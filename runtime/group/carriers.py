"""Transports over which posting a message may block, so that both ends post it at its place (`Program.posting`): NCCL.

Over Gloo a receive that is posted early costs nothing, and `messages.transport.Inbox` posts ahead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autopart.ir.actions import Action
from autopart.runtime.activity import set_activity, waiting
from autopart.runtime.group.shared_group import shared_group
from autopart.runtime.watch.processes import end_process

SPARE_S = 15.0
"""Seconds after the time limit in which the watch over the ranks may still end an opening."""


class NcclCarrier:
    """Messages between CUDA devices over NCCL; the host does not wait in a step.

    Each pair of ranks has one communicator, used only through batches, so that torch does not make another one.  It is
    used in both directions before the first step: the first message in a direction blocks the host until the peer
    comes, and no time limit of torch covers that.

    Sends are posted on the stream of the computes, whose results they carry.  A receive alone is posted on a stream of
    its own, so that it does not wait for earlier computes.
    """

    def __init__(self, rank: int, device: torch.device, pair_group: Callable[[int, int], dist.ProcessGroup]) -> None:
        self._rank, self._device, self._pair_group = rank, device, pair_group
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._posting = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open_pair(self, low: int, high: int) -> None:
        """Make the communicator of a pair, unless it is made, and send a byte in both directions.

        Collective over all ranks, in one order of all pairs and groups, while no other message is in flight; the two
        return when both can send."""
        group, peer = self._pair_group(low, high), low + high - self._rank
        if self._rank not in (low, high) or peer in self._groups:
            return
        self._groups[peer] = group
        with _deadline(f"opening the channel between ranks {low} and {high}"), waiting(peer):
            byte, back = (torch.zeros(1, dtype=torch.uint8, device=self._device) for _ in range(2))
            for work in self._batch(peer, [byte], [back]):
                work.wait()
            torch.cuda.synchronize(self._device)

    def open_group(self, group: dist.ProcessGroup) -> None:
        """Make the communicator by a sum.  Collective over the group, while no other message is in flight."""
        ranks = dist.get_process_group_ranks(group)
        with _deadline(f"opening the group of ranks {', '.join(map(str, ranks))}"), waiting():
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
            torch.cuda.synchronize(self._device)

    def post(
        self, peer: int, sends: Sequence[tuple[Action, torch.Tensor]], receives: Sequence[tuple[Action, int]]
    ) -> NcclPosted:
        """Post bytes to send, and numbers of bytes to receive, as one batch, without waiting; the peer posts the
        counterparts.  Actions name the messages, by their send."""
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
    """Messages that were posted together.

    received: the receive buffers, filled for what is issued after `wait`.  foreign: whether they belong to another
    stream than that of the computes."""

    def __init__(self, works: list[dist.Work], received: tuple[torch.Tensor, ...], *, foreign: bool) -> None:
        self._works = works
        self._foreign = foreign
        self.received = received

    def wait(self) -> None:
        """Make the current stream wait, so that what was sent may be overwritten; a second call does nothing."""
        for work in self._works:
            work.wait()
        if self._works and self._foreign:
            for buffer in self.received:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        self._works = []


CARRIERS = {"nccl": NcclCarrier}
"""By the name of the transport; made from this rank, its device and a function that opens the group of a pair."""


@contextmanager
def _deadline(doing: str) -> Iterator[None]:
    """End the process if the body blocks the host in NCCL for ever: a thread waits some seconds longer than the watch,
    which may be blocked as well, and says what was being opened."""
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
