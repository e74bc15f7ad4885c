"""A failure of one rank, while the ranks prepare something together, becomes an error on all of them at once.

Without this, the others would wait in their next collective for the one that left, until a timeout ends them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autopart.ir import errors
from autopart.ir.errors import AutopartError, PlanError, WorkerError
from autopart.runtime.group.world import World

FAILURES = (Exception, SystemExit)
"""What a model's own code may raise.  KeyboardInterrupt is not among them: who presses Ctrl-C wants no collective, and
the others hear of it as of everything that is raised outside of an agreement (`World.fail`)."""


@contextmanager
def together(world: World, doing: str) -> Iterator[None]:
    """Run the body, which sends nothing, on every rank, and leave it only once all ranks have succeeded.  Collective.

    When some ranks fail, the first of them decides: every rank raises its error, with that rank in `where`; or, when it
    is none of ours, that rank raises its own error and the others a WorkerError that names it.  The same error
    of all ranks is raised as it is.  doing: what fails, such as "capturing the model".
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
    """Tell the other ranks of this rank's failure and hear of theirs; raises as `together` does.  Collective."""
    if world.size == 1:
        if failure is not None:
            raise world.known(failure)
        return
    reports: list[Any] = [json.loads(text) if text else None for text in world.gather_text(_report(failure))]
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    first = failed[0]
    if failure is not None and (world.rank == first or _all_equal(reports)):
        raise world.known(_of_rank(failure, first, alone=not _all_equal(reports)))
    raise world.known(_told(reports[first], first, doing)) from failure


def broadcast_result(world: World, content: Any, failure: BaseException | None, doing: str, source: int = 0) -> Any:
    """`content` of rank `source` on every rank, or that rank's failure on all of them.  Collective.

    The rank is not named in one of our own errors: what it decides, it decides for all.
    """
    if world.size == 1 and failure is not None:
        raise world.known(failure)
    mine = {"failure": _described(failure) if failure is not None else None, "content": content}
    answer = world.broadcast_object(mine, source)
    if answer["failure"] is None:
        return answer["content"]
    if failure is not None:
        raise world.known(failure)
    report = answer["failure"]
    raise world.known(_rebuilt(report) if "kind" in report else _foreign(report, source, doing))


def require_same_everywhere(world: World, fingerprint: str) -> None:
    """Every rank must have captured the same program.  Collective; raises PlanError on all ranks."""
    fingerprints = world.gather_text(fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            error = PlanError(
                f"ranks 0 and {rank} hold different models or batches",
                why="their captured programs, or their seeds, differ",
                fix="build the same model, with the same flags, and pass the same sample and seed on every rank",
            )
            raise world.known(error)


def _report(failure: BaseException | None) -> str:
    return json.dumps(_described(failure)) if failure is not None else ""


def _described(failure: BaseException) -> dict[str, str]:
    """A failure as text that another rank can read."""
    if isinstance(failure, AutopartError):
        kind = type(failure).__name__
        return {"kind": kind, "what": failure.what, "where": failure.where, "why": failure.why, "fix": failure.fix}
    return {"name": type(failure).__name__, "message": (str(failure).splitlines() or [""])[0]}


def _all_equal(reports: Sequence[Any]) -> bool:
    return all(report == reports[0] for report in reports)


def _of_rank(failure: BaseException, rank: int, *, alone: bool) -> BaseException:
    """This rank's own failure; one of ours reads the same on every rank."""
    if alone and isinstance(failure, AutopartError):
        named = _rebuilt(_described(failure), rank)
        named.__cause__ = failure
        return named
    return failure


def _told(report: dict[str, str], rank: int, doing: str) -> AutopartError:
    """The failure of another rank, as this rank raises it."""
    return _rebuilt(report, rank) if "kind" in report else _foreign(report, rank, doing)


def _rebuilt(report: dict[str, str], rank: int | None = None) -> AutopartError:
    kind = getattr(errors, report["kind"], AutopartError)
    place = f"rank {rank}" if rank is not None else ""
    where = ", ".join(part for part in (place, report["where"]) if part)
    found = kind(report["what"], where=where, why=report["why"], fix=report["fix"])
    assert isinstance(found, AutopartError)
    return found


def _foreign(report: dict[str, str], rank: int, doing: str) -> WorkerError:
    return WorkerError(
        f"rank {rank} failed while {doing}: {report['name']}",
        why=report["message"],
        fix=f"see the traceback of rank {rank}; this error only follows from it",
    )
