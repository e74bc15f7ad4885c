"""What carries messages where posting one may block: both ends post each at its place (`Program.posting`).

NCCL is the one of ours (`runtime.nccl`).  Gloo is none of them: there a receive that is posted early costs nothing, and
`transport.Inbox` posts ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from autopart.ir.program import Action
from autopart.runtime.group.nccl import NcclCarrier

if TYPE_CHECKING:
    from autopart.runtime.group.world import World


class Posted(Protocol):
    """Messages that were posted together."""

    @property
    def received(self) -> tuple[torch.Tensor, ...]:
        """The buffers of what was received, filled once `wait` has returned or, on a device, for what follows it."""

    def wait(self) -> None:
        """What is issued from now on finds the received bytes, and may overwrite what was sent."""


class Carrier(Protocol):
    """Carries messages between this rank and others."""

    def open_pair(self, low: int, high: int) -> None:
        """Make ready for messages between two ranks.  Collective over all ranks, nothing else being under way; the
        two return when both can."""

    def open_group(self, group: dist.ProcessGroup) -> None:
        """Make ready for sums over a group.  Collective over its members, nothing else being under way."""

    def post(
        self, peer: int, sends: Sequence[tuple[Action, torch.Tensor]], receives: Sequence[tuple[Action, int]]
    ) -> Posted:
        """Post bytes to, and numbers of bytes from, a peer, together; the peer posts the same, the other way round.

        Actions name the messages, by their send."""


CARRIERS: dict[str, Callable[[World], Carrier]] = {"nccl": NcclCarrier}
"""By the name of the transport."""
