"""Functions that the tests of messages run in worker processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopart.runtime.group.world import World
from autopart.runtime.messages.transport import Inbox, Outbox, offsets

COUNT = 6
SPECS = tuple(
    torch.empty(shape, dtype=dtype, device="meta")
    for shape, dtype in (((2, 3), torch.float32), ((5,), torch.int64), ((), torch.float64))
)


def message(number: int) -> list[torch.Tensor]:
    """Return tensors that identify the message by its number."""
    return [torch.full_like(spec, number, device="cpu") for spec in SPECS]


def taken_in_order(keys: Sequence[int]) -> list[list[float]]:
    """Send `COUNT` messages from rank 0 and receive them on rank 1 in the order of `keys`; return their contents."""
    world = World("cpu", 2)
    channel = world.group((0, 1))
    found = []
    if world.rank == 0:
        outbox = Outbox(1, channel)
        for number in range(COUNT):
            outbox.send(message(number), number)
        outbox.flush()
    else:
        inbox = Inbox(0, channel, world.device)
        inbox.expect([(number, SPECS, offsets(SPECS)[1]) for number in range(COUNT)])
        found = [[float(tensor.flatten()[0]) for tensor in inbox.receive(key)] for key in keys]
    world.close()
    return found
