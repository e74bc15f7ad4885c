"""Sums of gradients of which each number is sent as bf16: half the bytes of single precision, 8 bits of each.

Every rank gets its share of the numbers from all others, adds them up as wide as they were, in the order of the ranks,
and sends the sums to all: so a number is rounded twice, however many ranks there are, and all ranks hold the same bits.
Where one rank needs the sums, all send it everything, and a number is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopart.runtime.world import World


class CompressedSum:
    """A sum over the ranks of a group, in place, in `flat`.  to: the one rank that needs it, None where all do.

    Posts its first messages at once; the others by `finish_sending` and then `finish` of all sums, in one order on all
    ranks.
    """

    def __init__(
        self, flat: torch.Tensor, world: World, ranks: Sequence[int], group: dist.ProcessGroup, to: int | None
    ) -> None:
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        self._flat, self._group, self._to = flat, group, to
        self._receives = to in (None, world.rank)
        device = torch.device("cpu") if world.staged else flat.device
        shares = len(ranks) if to is None else 1
        each = -(-flat.numel() // shares)
        rounded = torch.zeros(each * shares, dtype=torch.bfloat16, device=device)
        rounded[: flat.numel()].copy_(flat)
        sent = rounded.view(torch.uint8)  # bytes, which every backend carries
        self._sent = list(torch.split(sent, 2 * each))
        self._got = [torch.empty_like(self._sent[0]) for _ in ranks] if self._receives else []
        if to is None:
            self._work = dist.all_to_all(self._got, self._sent, group=group, async_op=True)
        else:
            self._work = dist.gather(self._sent[0], self._got or None, dst=to, group=group, async_op=True)

    def finish_sending(self) -> None:
        """Add up this rank's share, and send it to all that need it."""
        self._work.wait()
        if not self._receives:
            return
        parts = [part.view(torch.bfloat16) for part in self._got]
        total = parts[0].to(self._flat.dtype)
        for part in parts[1:]:
            total += part
        if self._to is None:
            own = total.to(torch.bfloat16).view(torch.uint8)
            self._work = dist.all_gather(self._got, own, group=self._group, async_op=True)
        else:
            self._flat.copy_(total)

    def finish(self) -> None:
        """Take the sums."""
        if self._to is None:
            self._work.wait()
            self._flat.copy_(torch.cat(self._got).view(torch.bfloat16)[: self._flat.numel()])
