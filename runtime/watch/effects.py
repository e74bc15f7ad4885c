"""Errors that only follow from another one: they report that a peer went away, and not why."""

from __future__ import annotations

import re

from autopart.ir.errors import AutopartError, WorkerError

# Messages of torch.distributed, Gloo and NCCL when the other side went away.
_PEER_TROUBLE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer|failed to recv"
    r"|socket (closed|timeout)|timed? ?out|recvvalue failed|remote process exited|ncclremoteerror"
    r"|nccl communicator was aborted|tcpstore|caused pair closure",
    re.IGNORECASE,
)


def is_effect(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, only reports that a peer went away."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerError | ConnectionError):
            return True
        if (
            isinstance(cause, RuntimeError)
            and not isinstance(cause, AutopartError)
            and _PEER_TROUBLE.search(str(cause))
        ):
            return True
        cause = cause.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or ""."""
    return (str(error).splitlines() or [""])[0]
