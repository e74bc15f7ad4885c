"""Messages between stages over Gloo: one first-in first-out channel for each directed pair of ranks.

All values that one stage sends another for one micro-batch travel as one message.  They lie in it, and at the receiver,
as they lay in memory when they were captured: kernels are as fast, and round, as in the model that is not split.  A
single tensor that lies so is sent in place; several, or one that lies otherwise, are packed.  A send is waited for when
a later message of the peer has shown that it was consumed, or at the end of the step, so no rank blocks in a send.

Gloo only accesses host memory: messages of a CUDA device pass through pinned memory, and the host waits for the ops
that compute them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopart.ir.errors import WorkerError
from autopart.ir.program import MESSAGES_AHEAD
from autopart.rng import memory_order
from autopart.runtime.activity import waiting

_ALIGN = 64
_SMALL_BYTES = 1 << 18
"""Bytes of receives that a channel posts ahead in any case.  Posting takes as long as a small stage computes, so small
messages are posted before the first of them is needed; the memory of a plan does not count these bytes."""

Specs = tuple[torch.Tensor, ...]
"""Shapes, dtypes and memory orders of the tensors of a message, as dense tensors on the meta device."""

Announced = tuple[Any, Specs, int]
"""A message to come: its key, its tensors and its bytes (`offsets`)."""


def offsets(specs: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each tensor of a message begins, and the bytes of the whole message."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    if specs:
        end = starts[-1] + specs[-1].nbytes
    return starts, end


def pack(tensors: Sequence[torch.Tensor], specs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one flat byte tensor that holds them all; a single tensor that lies as it is to be sent is not copied."""
    own = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]  # bytes do not show what is still to do
    laid = [tensor.permute(memory_order(spec)) for tensor, spec in zip(own, specs, strict=True)]
    if len(laid) == 1 and laid[0].is_contiguous():
        return laid[0].reshape(-1).view(torch.uint8)
    starts, total = offsets(specs)
    buffer = torch.empty(total, dtype=torch.uint8, device=tensors[0].device)
    for start, tensor in zip(starts, laid, strict=True):
        target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
    return buffer


def unpack(buffer: torch.Tensor, specs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a received message."""
    starts, _ = offsets(specs)
    pieces = zip(starts, specs, strict=True)
    return [buffer[a : a + spec.nbytes].view(spec.dtype).as_strided(spec.shape, spec.stride()) for a, spec in pieces]


def _pinned(size: int) -> torch.Tensor:
    """Allocate host memory that a CUDA device reads and writes; torch caches it for the next message."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Outbox:
    """Sends on one channel, in order; each message has a key.  staged: messages lie on a CUDA device."""

    def __init__(self, peer: int, group: dist.ProcessGroup, *, staged: bool = False) -> None:
        self._group, self._staged = group, staged
        self._peer = dist.get_group_rank(group, peer)
        self._errors = _PeerErrors(peer)
        self._pending: dict[Hashable, tuple[dist.Work | None, torch.Tensor]] = {}

    def send(self, tensors: Sequence[torch.Tensor], specs: Sequence[torch.Tensor], key: Hashable = None) -> None:
        """Post one message without waiting.  specs: how its tensors are to lie."""
        buffer = pack(tensors, specs)
        work = None
        if self._staged:
            buffer = _pinned(buffer.numel()).copy_(buffer)  # returns when the bytes are there
        if buffer.numel():
            with self._errors:
                work = self._group.send([buffer], self._peer, 0)  # as `dist.isend`, which checks more than it sends
        self._pending[key] = work, buffer

    def acknowledge(self, keys: Iterable[Hashable]) -> None:
        """Release the buffers of messages that the peer has consumed; does not block."""
        for key in keys:
            work, _ = self._pending.pop(key)
            if work is not None:
                with self._errors:
                    work.wait()

    def flush(self) -> None:
        """Wait for all pending sends."""
        self.acknowledge(list(self._pending))


class Inbox:
    """Receives on one channel, posted in the order in which the peer sends, up to `ahead` more than were taken, or more
    while they are small together.

    A message may be taken before one that was sent earlier: then more are posted, and the earlier one is kept.
    staged: messages go to a CUDA device.
    """

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        device: torch.device,
        ahead: int = MESSAGES_AHEAD,
        *,
        staged: bool = False,
    ) -> None:
        self._group, self._device, self._staged = group, device, staged
        self._peer = dist.get_group_rank(group, peer)
        self._errors = _PeerErrors(peer)
        self._ahead = ahead
        self._expected: deque[Announced] = deque()
        self._posted: dict[Hashable, tuple[dist.Work | None, torch.Tensor, Specs]] = {}
        self._posted_bytes = 0

    def expect(self, messages: Iterable[Announced]) -> None:
        """Announce messages to come, in order; the first of them are posted."""
        self._expected.extend(messages)
        self._post_ahead()

    def receive(self, key: Hashable = None) -> list[torch.Tensor]:
        """Wait for a message that was announced, and return its tensors."""
        while key not in self._posted:
            self._post()
        work, buffer, specs = self._posted.pop(key)
        self._posted_bytes -= buffer.numel()
        # Before the wait: posting tells the peer.  Just after this message arrives, the peer is often still inside its
        # send, and Gloo's thread there spins, on a core that computes, until the send lets go of the pair.
        self._post_ahead()
        if work is not None:
            with self._errors:
                work.wait()
        if self._staged:
            buffer = buffer.to(self._device, non_blocking=True)
        return unpack(buffer, specs)

    def _post_ahead(self) -> None:
        while self._expected and (
            len(self._posted) < self._ahead or self._posted_bytes + self._expected[0][2] <= _SMALL_BYTES
        ):
            self._post()

    def _post(self) -> None:
        key, specs, total = self._expected.popleft()
        buffer = _pinned(total) if self._staged else torch.empty(total, dtype=torch.uint8, device=self._device)
        work = None
        if total:
            with self._errors:
                work = self._group.recv([buffer], self._peer, 0)
        self._posted[key] = work, buffer, specs
        self._posted_bytes += total


class _PeerErrors:
    """Note that the body may wait for a peer, and turn errors of torch.distributed into one that names the peer."""

    def __init__(self, peer: int) -> None:
        self._peer, self._waiting = peer, waiting(peer)

    def __enter__(self) -> None:
        self._waiting.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waiting.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and not isinstance(error, WorkerError):
            raise WorkerError(
                f"rank {self._peer} stopped answering",
                why=(str(error).splitlines() or ["no reason given"])[0],
                fix="look for the first error on that rank; this one only follows from it",
            ) from error
