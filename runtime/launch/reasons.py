"""Why a launch ended: what the parent raises for what it saw of its workers."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopart.ir.errors import AutopartError, RunError, UsageError, WorkerError
from autopart.runtime.activity import NOBODY, Phase, SharedStatus, text_of
from autopart.runtime.launch.worker import Failure
from autopart.runtime.watch.states import RankState, held_up_by

UNGUARDED = 86  # exit code of a worker that reached `launch` while it still imported the main script
GUARD = 'put the call behind  if __name__ == "__main__":  and the functions it runs at the top level of the file'


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended without an answer.  priority: 0 cause, 1 abort (often of a communication thread)."""

    rank: int
    exitcode: int | None
    at: float

    @property
    def priority(self) -> int:
        """Rank among causes; the smallest wins."""
        return 1 if self.exitcode == -signal.SIGABRT else 0


@dataclass(frozen=True, slots=True)
class Stop:
    """A process that a signal stopped: it lives, and does nothing."""

    rank: int
    at: float
    priority: int = 0


def state_of_rank(rank: int, status: SharedStatus) -> RankState:
    """A rank as its status says; readable after it was killed."""
    return RankState(rank, text_of(status.label), text_of(status.note), Phase(status.phase), status.waits)


def told(state: RankState, cause: Failure | Death | Stop, doing: str) -> AutopartError:
    """The error for the first cause."""
    if isinstance(cause, Failure):
        return raised(state, cause)
    if isinstance(cause, Stop):
        why = "the process was stopped by a signal (SIGSTOP, Ctrl-Z): it lives and does nothing"
        return WorkerError(f"{state.name} is stopped", where=state.doing or doing, why=why)
    return _died(state, cause, doing)


def raised(state: RankState, cause: Failure) -> AutopartError:
    """The error for a worker's exception: our own again with rank and stage, or a WorkerError."""
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


def no_answer(states: Sequence[RankState], answers: Mapping[int, object], doing: str) -> RunError:
    """The time limit is over: those that hold up the others are named, not those that wait for them."""
    known = {
        state.rank: replace(state, phase=Phase.AWAY, waits=NOBODY, doing="finished") if state.rank in answers else state
        for state in states
    }
    late = [state for state in known.values() if state.rank not in answers]
    blamed = {root.rank: root for state in late if state.waiting for root in held_up_by(state.rank, known)}
    blamed |= {state.rank: state for state in late if not state.waiting}
    named = [state for rank, state in sorted(blamed.items()) if rank not in answers] or late
    what = f"no answer in time from {', '.join(state.name for state in named)} while {doing}"
    lines = [state.line() for state in late] + [f"{known[r].name}: finished" for r in sorted(answers)]
    return WorkerError(what, why="last known of each rank:" + "".join(f"\n    {line}" for line in lines))


def _died(state: RankState, cause: Death, doing: str) -> AutopartError:
    if cause.exitcode == UNGUARDED:
        return UsageError(
            "the script starts its worker processes again in each worker",
            why="a worker imports the main script, and the script calls launch while it is imported",
            fix=GUARD,
        )
    how = _ended(cause.exitcode)
    if doing == "starting":
        why = "it could not import the main script; its own message is above"
        return WorkerError(f"{state.name} did not start: {how}", why=why if cause.exitcode == 1 else "", fix=GUARD)
    fix = {
        -signal.SIGKILL: "unless someone killed it, memory ran out (see dmesg): take more stages or micro-batches",
        -signal.SIGSEGV: "it crashed in native code: set PYTHONFAULTHANDLER=1 to see where",
    }.get(cause.exitcode or 0, "")
    return WorkerError(f"{state.name} died: {how}", where=state.doing, fix=fix)


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
