"""Break process groups on purpose, so that neither this rank nor its peers wait in them any more.

NCCL's communicators are aborted.  Gloo has no such call, but a receive that times out closes all connections of its
group, in every thread that waits in one, and the peers see them closed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_TAG = 1 << 20
"""The tag of a message that is never sent."""


def break_group(group: dist.ProcessGroup) -> None:
    """Let everything that waits in this group raise, on all threads and ranks.  May be called from any thread; takes
    milliseconds."""
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
