"""Tensors that move from rank to rank when the plan changes, many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from autopart.runtime.group.world import World
from autopart.runtime.tensors import dense

K = TypeVar("K", bound=Hashable)
Route = tuple[K, int, int]
"""What a tensor is called, the rank that has it, the rank that needs it."""
WINDOW_BYTES = 64 << 20
"""Bytes of copies that a rank has under way at once, or a single larger one: what lies on a device, or not in one
piece, passes through a copy in host memory."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A message under way.  tensor: what it is for; data: what is sent or received, kept until the end.  copied_bytes:
    of host memory, if data is a copy."""

    tensor: torch.Tensor
    data: torch.Tensor
    arrives: bool
    copied_bytes: int
    wait: Callable[[], None]

    def finish(self) -> None:
        """Wait until it has come or gone."""
        self.wait()
        if not self.arrives:
            return
        with torch.no_grad():
            if self.copied_bytes:
                self.tensor.copy_(self.data)
            else:
                torch.autograd.graph.increment_version(self.tensor)  # as a copy would


def move_tensors(world: World, routes: Sequence[Route[K]], local: Mapping[K, torch.Tensor]) -> None:
    """Copy tensors between ranks, in place.  Collective.  Bytes sent: those of the tensors that move.

    routes: in the same order on every rank.  local: what this rank sends and what it receives into.

    Each rank posts its own messages in this order, all at once but for copies, of which `WINDOW_BYTES` are under way.
    This cannot hang: a rank waits only for the first of its messages that is not done, which it has posted; so both
    ends of the first one of all that is not done have posted it.
    """
    under_way: deque[_Message] = deque()
    copied = 0
    for route in routes:
        name, source, target = route
        if world.rank not in (source, target) or source == target:
            continue
        while copied and copied + local[name].nbytes > WINDOW_BYTES:
            done = under_way.popleft()
            done.finish()
            copied -= done.copied_bytes
        under_way.append(_begun(world, route, local[name]))
        copied += under_way[-1].copied_bytes
    for message in under_way:
        message.finish()


def _begun(world: World, route: Route[K], tensor: torch.Tensor) -> _Message:
    _, source, target = route
    arrives = world.rank == target
    data = dense(tensor.detach())
    direct = tensor.layout == torch.strided and data.device.type == "cpu" and data.is_contiguous()
    if not direct:
        data = torch.empty(data.shape, dtype=data.dtype) if arrives else data.cpu().contiguous()
    copied_bytes = 0 if direct else data.nbytes
    return _Message(tensor, data, arrives, copied_bytes, world.begin_moving(data, source, target))
