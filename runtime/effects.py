"""Which errors only follow from another one: they say that a peer went away, and not why."""

from __future__ import annotations

import re

from autopart.ir.errors import AutopartError, WorkerError

# What torch.distributed, Gloo and NCCL say when the other side went away: an effect, not the cause.
_PEER_TROUBLE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer|failed to recv"
    r"|socket (closed|timeout)|timed? ?out|recvvalue failed|remote process exited|ncclremoteerror"
    r"|nccl communicator was aborted|tcpstore|caused pair closure",
    re.IGNORECASE,
)


def is_effect(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, only says that a peer went away."""
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
    """The first line of what an error says, or ""."""
    return (str(error).splitlines() or [""])[0]
