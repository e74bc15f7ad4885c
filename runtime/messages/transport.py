"""Messages between stages: one first-in first-out channel per directed pair of ranks, Gloo or NCCL.

All values that one stage sends another for one micro-batch travel as one message.  A single contiguous tensor is
sent as it lies; several, or one that is not contiguous, are packed.  During a step a send is waited for only when a
later message of the peer has shown that it was consumed, so that no rank blocks in a send; the end of the step waits
for what is left.

Gloo knows memory of the host alone: messages of a CUDA device pass through pinned memory, and the host waits for what
computes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopart.ir.errors import WorkerError
from autopart.ir.program import MESSAGES_AHEAD
from autopart.runtime.activity import waiting

_ALIGN = 64


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def offsets(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Where each tensor of a message begins, and the bytes of the whole message."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.nbytes // _ALIGN) * _ALIGN
    if specs:
        end = starts[-1] + specs[-1].nbytes
    return starts, end


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat byte tensor that holds them all; no copy for a single contiguous tensor."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _bytes(tensors[0])
    starts, total = offsets([Spec(tuple(t.shape), t.dtype) for t in tensors])
    buffer = torch.empty(total, dtype=torch.uint8, device=tensors[0].device)
    for start, tensor in zip(starts, tensors, strict=True):
        target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor.detach())
    return buffer


def unpack(buffer: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Views of a received message; no copy."""
    starts, _ = offsets(specs)
    pieces = zip(starts, specs, strict=True)
    return [buffer[a : a + spec.nbytes].view(spec.dtype).view(spec.shape) for a, spec in pieces]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pinned(size: int) -> torch.Tensor:
    """Memory of the host that a CUDA device reads and writes by itself.  torch keeps it for the next message."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Outbox:
    """Sends on one channel, in order.  Messages are told apart by a key of the caller's."""

    def __init__(self, peer: int, group: dist.ProcessGroup, *, staged: bool = False) -> None:
        """staged: messages lie on a CUDA device and leave from pinned memory."""
        self._peer = peer
        self._group = group
        self._staged = staged
        self._errors = _peer_errors(peer)
        self._pending: dict[Hashable, tuple[dist.Work | None, torch.Tensor]] = {}

    def send(self, tensors: Sequence[torch.Tensor], key: Hashable = None) -> None:
        """Post one message; returns at once."""
        buffer = pack(tensors)
        work = None
        if self._staged:
            buffer = _pinned(buffer.numel()).copy_(buffer)  # returns when the bytes are there
        if buffer.numel():
            with self._errors:
                work = dist.isend(buffer, self._peer, group=self._group)
        self._pending[key] = work, buffer

    def acknowledge(self, keys: Iterable[Hashable]) -> None:
        """The peer has consumed these messages: their buffers are released, without waiting."""
        for key in keys:
            self._finish(key)

    def flush(self) -> None:
        """Wait for all sends that are still pending."""
        for key in list(self._pending):
            self._finish(key)

    def _finish(self, key: Hashable) -> None:
        work, _ = self._pending.pop(key)
        if work is not None:
            with self._errors:
                work.wait()


class Inbox:
    """Receives on one channel, posted in the order in which the peer sends, up to `ahead` of what was taken.

    A message may be taken before one that was sent earlier: then more are posted, and the earlier one waits here.
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
        """staged: messages for this CUDA device arrive in pinned memory."""
        self._staged = staged
        self._peer = peer
        self._group = group
        self._errors = _peer_errors(peer)
        self._device = device
        self._ahead = ahead
        self._expected: deque[tuple[Hashable, tuple[Spec, ...]]] = deque()
        self._posted: dict[Hashable, tuple[dist.Work | None, torch.Tensor, tuple[Spec, ...]]] = {}

    def expect(self, messages: Iterable[tuple[Hashable, tuple[Spec, ...]]]) -> None:
        """Messages to come, in order, by key; the first of them are posted."""
        self._expected.extend(messages)
        self._post_ahead()

    def receive(self, key: Hashable = None) -> list[torch.Tensor]:
        """The tensors of a message that was announced by `expect`; waits for it."""
        while key not in self._posted:
            self._post()
        work, buffer, specs = self._posted.pop(key)
        if work is not None:
            with self._errors:
                work.wait()
        self._post_ahead()
        if self._staged:
            buffer = buffer.to(self._device, non_blocking=True)
        return unpack(buffer, specs)

    def _post_ahead(self) -> None:
        while self._expected and len(self._posted) < self._ahead:
            self._post()

    def _post(self) -> None:
        key, specs = self._expected.popleft()
        _, total = offsets(specs)
        buffer = _pinned(total) if self._staged else torch.empty(total, dtype=torch.uint8, device=self._device)
        work = None
        if total:
            with self._errors:
                work = dist.irecv(buffer, self._peer, group=self._group)
        self._posted[key] = work, buffer, specs


class _peer_errors(waiting):
    """The body may wait for a peer; torch.distributed's failures as ours, naming it."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self._peer = peer

    def __exit__(self, kind: Any = None, error: BaseException | None = None, trace: Any = None) -> None:
        super().__exit__()
        if isinstance(error, RuntimeError) and not isinstance(error, WorkerError):
            raise WorkerError(
                f"rank {self._peer} stopped answering",
                why=(str(error).splitlines() or ["no reason given"])[0],
                fix="look for the first error on that rank; this one only follows from it",
            ) from error
