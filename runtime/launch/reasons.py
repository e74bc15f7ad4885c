"""What the parent raises for what it saw of its workers."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from autopart.ir.errors import AutopartError, UsageError, WorkerError
from autopart.runtime.activity import SharedStatus
from autopart.runtime.launch.worker import Failure
from autopart.runtime.watch.states import state_of_rank

UNGUARDED = 86  # exit code of a worker that reached `launch` while it still imported the main script
STARTING = "starting"  # what ranks do that import the main script
GUARD = 'put the call behind  if __name__ == "__main__":  and the functions it runs at the top level of the file'


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended without an answer, or was stopped by a signal.  priority: 0 for a cause, 1 for an abort,
    which communication threads raise often."""

    rank: int
    exitcode: int | None
    at: float
    stopped: bool = False

    @property
    def alone(self) -> bool:
        """Whether it was killed, stopped or crashed, rather than ended because a peer had."""
        return self.stopped or (self.exitcode is not None and self.exitcode < 0 and self.exitcode != -signal.SIGABRT)

    @property
    def left(self) -> bool:
        """Whether it ended by itself, with an exit code."""
        return self.exitcode is not None and self.exitcode >= 0

    @property
    def priority(self) -> int:
        """Place among causes; the smallest is reported."""
        return 1 if self.exitcode == -signal.SIGABRT else 0


def first_cause(answers: Collection[object]) -> Failure | Death | None:
    """Return the earliest failure that is a cause rather than an effect; None if nothing failed."""
    failures = [a for a in answers if isinstance(a, Failure | Death)]
    return min(failures, key=lambda a: (a.priority, a.at), default=None)


def is_explained(answers: Collection[object]) -> bool:
    """Return whether a cause is among the failures, or an error that names one that its rank cannot report itself."""
    failures = [a for a in answers if isinstance(a, Failure | Death)]
    named = [a for a in failures if isinstance(a, Failure) and a.error]
    came = {None, *(failure.rank for failure in failures)}
    return any(a.priority == 0 for a in failures) or any(a.told_by in came for a in named)


def error_for(cause: Failure | Death, status: SharedStatus, doing: str = "") -> AutopartError:
    """Return the error to raise for a cause.  status: of its rank; doing: what the ranks were asked to do."""
    state = state_of_rank(cause.rank, status)
    if isinstance(cause, Death) and cause.stopped:
        why = "the process was stopped by a signal (SIGSTOP, Ctrl-Z): it lives and does nothing"
        return WorkerError(f"{state.name} is stopped", where=state.doing or doing, why=why)
    if isinstance(cause, Death):
        return _died(state.name, state.doing, cause.exitcode, doing)
    error = _load_error(cause)
    if error is not None:
        place = error.where.removeprefix(f"rank {cause.rank}").removeprefix(", ")  # `name` says it better
        known = (place,) if place.startswith("rank ") else (place, state.name, state.doing)  # reported for another
        where = ", ".join(part for part in known if part)
        again = type(error)(error.what, where=where, why=error.why, fix=error.fix)
        again.add_note(f"traceback of {state.name}:\n{cause.trace}")
        return again
    trace = "\n" + "\n".join("    " + line for line in cause.trace.splitlines())
    return WorkerError(f"{state.name} raised {cause.kind}: {cause.message}", where=state.doing, why=trace)


def _died(name: str, did: str, exitcode: int | None, doing: str) -> AutopartError:
    if exitcode == UNGUARDED:
        return UsageError(
            "the script starts its worker processes again in each worker",
            why="a worker imports the main script, and the script calls launch while it is imported",
            fix=GUARD,
        )
    how = _ended(exitcode)
    fix = {
        -signal.SIGKILL: "unless someone killed it, memory ran out (see dmesg): take more stages or micro-batches",
        -signal.SIGSEGV: "it crashed in native code: set PYTHONFAULTHANDLER=1 to see where",
    }.get(exitcode or 0, "")
    if doing == STARTING:
        why = "it could not import the main script; its own message is above" if exitcode == 1 else ""
        return WorkerError(f"{name} did not start: {how}", why=why, fix=fix if (exitcode or 0) < 0 else GUARD)
    return WorkerError(f"{name} died: {how}", where=did, fix=fix)


def _load_error(cause: Failure) -> AutopartError | None:
    try:
        error = pickle.loads(cause.error) if cause.error else None
    except Exception:
        return None
    return error if isinstance(error, AutopartError) else None


def _ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "it closed its pipe"
    if exitcode >= 0:
        return f"exited with code {exitcode} before it answered"
    with suppress(ValueError):
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"killed by signal {-exitcode}"
