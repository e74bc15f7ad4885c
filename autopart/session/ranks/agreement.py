"""Errors of one rank, while the ranks prepare something together, raised on all ranks at once.

Otherwise the other ranks would wait in their next collective until a timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autopart.ir import errors
from autopart.ir.errors import AutopartError, PlanError, WorkerError
from autopart.runtime.group.world import World

FAILURES = (Exception, SystemExit)
"""Errors that ranks exchange in a collective.  KeyboardInterrupt is told to the other ranks by `World.fail` instead, so
that Ctrl-C waits for no collective."""


@contextmanager
def together(world: World, doing: str) -> Iterator[None]:
    """Run the body, which sends nothing, on every rank, and go on once all ranks have succeeded.  Collective.

    When ranks fail, every rank raises the error of the first of them, with that rank in `where`.  If it is not an
    AutopartError, that rank raises it and the others raise a WorkerError that names the rank.  An error that is equal
    on all ranks is raised unchanged.  doing: the activity that error messages name, such as "capturing the model".
    """
    failure: BaseException | None = None
    try:
        yield
    except FAILURES as error:
        if world.size == 1:
            raise
        failure = error
    raise_first(world, failure, doing)


def raise_first(world: World, failure: BaseException | None, doing: str) -> None:
    """Exchange the failures of all ranks, and raise one as `together` does.  Collective."""
    if world.size == 1:
        if failure is not None:
            raise world.known(failure)
        return
    mine = json.dumps(_described(failure)) if failure is not None else ""
    reports: list[Any] = [json.loads(text) if text else None for text in world.gather_text(mine)]
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    first = failed[0]
    alike = all(report == reports[0] for report in reports)
    own = world.rank == first and not isinstance(failure, AutopartError)
    if failure is not None and (own or alike):
        raise world.known(failure)
    raise world.known(_rebuilt(reports[first], first, doing)) from failure


def from_rank(world: World, source: int, doing: str, make: Callable[[], Any]) -> Any:
    """Call `make` on rank `source` and return its result, which JSON can hold, on every rank.  Collective.

    A failure of `make` is raised on all ranks.  An AutopartError does not name the rank, which decides for all.
    """
    content: Any = None
    failure: BaseException | None = None
    if world.rank == source:
        try:
            content = make()
        except FAILURES as error:
            failure = error
    if world.size == 1 and failure is not None:
        raise world.known(failure)
    mine = {"failure": _described(failure) if failure is not None else None, "content": content}
    answer = world.broadcast_object(mine, source)
    if answer["failure"] is None:
        return answer["content"]
    if failure is not None:
        raise world.known(failure)
    raise world.known(_rebuilt(answer["failure"], source, doing, named=False))


def require_same_everywhere(world: World, fingerprint: str) -> None:
    """Raise PlanError on all ranks when they have captured different programs.  Collective."""
    fingerprints = world.gather_text(fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            error = PlanError(
                f"ranks 0 and {rank} hold different models or batches",
                why="their captured programs, or their seeds, differ",
                fix="build the same model, with the same flags, and pass the same sample and seed on every rank",
            )
            raise world.known(error)


def _described(failure: BaseException) -> dict[str, str]:
    """Return a failure as text that another rank can rebuild."""
    if isinstance(failure, AutopartError):
        kind = type(failure).__name__
        return {"kind": kind, "what": failure.what, "where": failure.where, "why": failure.why, "fix": failure.fix}
    return {"name": type(failure).__name__, "message": (str(failure).splitlines() or [""])[0]}


def _rebuilt(report: dict[str, str], rank: int, doing: str, *, named: bool = True) -> AutopartError:
    """Return the failure of a rank as another rank raises it.  named: whether an AutopartError names the rank."""
    if "kind" not in report:
        return WorkerError(
            f"rank {rank} failed while {doing}: {report['name']}",
            why=report["message"],
            fix=f"see the traceback of rank {rank}; this error only follows from it",
        )
    kind = getattr(errors, report["kind"], AutopartError)
    where = ", ".join(part for part in (f"rank {rank}" if named else "", report["where"]) if part)
    found = kind(report["what"], where=where, why=report["why"], fix=report["fix"])
    assert isinstance(found, AutopartError)
    return found
