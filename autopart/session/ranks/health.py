"""Whether a rank may still send and receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopart.ir.errors import RunError
from autopart.runtime.effects import first_line


class Health:
    """Whether something failed on this rank while ranks were running.

    Then nothing more may be sent: messages of the failed step may still be under way and would be taken for others,
    and the other ranks may wait in a collective for this one.
    """

    def __init__(self) -> None:
        self._failure = ""

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Note any failure of the body."""
        try:
            yield
        except BaseException as error:
            self.note(doing, error)
            raise

    def note(self, doing: str, error: BaseException) -> None:
        """Note a failure; the first one counts."""
        if not self._failure:
            self._failure = f"{doing}: {type(error).__name__}: {first_line(error)}"

    @property
    def good(self) -> bool:
        """Whether nothing has failed."""
        return not self._failure

    def require(self) -> None:
        """Raises RunError when something has failed."""
        if self._failure:
            raise RunError(
                "the pipeline has failed and takes no further step",
                why=f"{self._failure}; the ranks are not connected any more.  Gradients and buffers are as before it",
                fix="pipe.local_state_dict() still returns this rank's part of the weights; then close the pipe on "
                "every rank, load a state, and compile the model again",
            )
