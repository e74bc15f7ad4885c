"""What an extra hears of a session: the list by which checkpoints, asynchronous training, speeds and averages enter."""

from __future__ import annotations

from autopart.ir.plan import Plan
from autopart.session.executors.step_end import StepEnd


class Listener:
    """Hears what a session does, in `Calls.listeners`; an entry overrides what it needs.

    Every rank has the same entries in the same order, and calls none of these methods itself.

    leaves: what a failure would leave behind now, for messages; "" for gradients and buffers as before the call.
    late: whether this rank tells of calls that it looks at only after others; a rank that makes another call then ends
    the pipe, since the others may wait for it by the time they would see that.
    """

    leaves = ""
    late = False

    def brought_up(self, plan: Plan) -> None:
        """Go on under a plan: the first one, or another one that has just taken its place.  May be collective."""

    def before_call(self, name: str) -> BaseException | None:
        """Prepare for a collective call (`call_sync.NAMES`), or return why it cannot be made, for instance an error of
        something that went on beside the calls; all ranks raise it, before the call does anything.  May be collective.
        """
        return None

    def told(self) -> None:
        """Return nothing more that `before_call` would: some rank's has just been raised on all."""

    def counted(self) -> list[float]:
        """Return always as many numbers, of what this rank did since its last step; -inf for none.  Local."""
        return []

    def compare(self, numbers: list[tuple[float, float]]) -> None:
        """Look, on rank 0, at the largest and the smallest number of all ranks for each of `counted`.  Local."""

    def step_ended(self, end: StepEnd) -> None:
        """Note what all ranks know of a step of `Session.loss`.  Local."""

    def failed(self, doing: str, error: BaseException) -> None:
        """Save what can be saved: a failure in a call has ended the pipe.  Raises nothing.

        doing: the call that failed.  error: the one that came first, on whichever rank."""

    def closing(self, *, healthy: bool) -> None:
        """Finish, before the weights come together.  Collective if `healthy`; the first error is raised afterwards."""

    def closed(self) -> None:
        """Free what is left; weights have come together.  Local."""
