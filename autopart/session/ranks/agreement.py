"""Errors of one rank, while the ranks prepare something together, raised on all ranks at once.

Otherwise the other ranks would wait in their next collective until a timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from autopart.ir.errors import AutopartError, PlanError, UsageError, WorkerError
from autopart.runtime.group.world import World
from autopart.runtime.watch.effects import first_line

T = TypeVar("T")
_Told = AutopartError | tuple[str, str]
"""A failure as it is sent: an error of autopart, or the name of another one and the first line of its message."""
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
    if any(world.reduce_numbers([float(failure is not None)])):
        raise_first(world, failure, doing)


def raise_first(world: World, failure: BaseException | None, doing: str) -> None:
    """Exchange the failures of all ranks, and raise one as `together` does.  Collective."""
    if world.size == 1:
        if failure is not None:
            raise world.known(failure)
        return
    reports = world.gather_objects(_told(failure) if failure is not None else None)
    failed = [(rank, told) for rank, told in enumerate(reports) if told is not None]
    if not failed:
        return
    first, told = failed[0]
    alike = len(set(map(repr, reports))) == 1
    own = world.rank == first and not isinstance(failure, AutopartError)
    if failure is not None and (own or alike):
        raise world.known(failure)
    raise world.known(_rebuilt(told, first, doing)) from failure


def from_rank(world: World, source: int, doing: str, make: Callable[[], T]) -> T:
    """Call `make` on rank `source` and return its result, which is pickled, on every rank.  Collective.

    A failure of `make` is raised on all ranks.  An AutopartError does not name the rank, which decides for all.
    """
    content: T | None = None
    failure: BaseException | None = None
    if world.rank == source:
        try:
            content = make()
        except FAILURES as error:
            failure = error
    if world.size == 1 and failure is not None:
        raise world.known(failure)
    told, content = world.broadcast_object((_told(failure) if failure is not None else None, content), source)
    if told is None:
        return content
    if failure is not None:
        raise world.known(failure)
    raise world.known(_rebuilt(told, source, doing, named=False))


def require_same_everywhere(world: World, fingerprint: str, options: Mapping[str, str]) -> None:
    """Raise on all ranks when they have captured different programs, or were given different options, which are texts
    here.  Collective."""
    fingerprints = world.gather_objects(f"{fingerprint} {hashlib.sha256(repr(options).encode()).hexdigest()}")
    other = next((rank for rank, own in enumerate(fingerprints) if own != fingerprints[0]), None)
    if other is None:
        return
    every = world.gather_objects(options)
    name = next((name for name in options if every[other][name] != every[0][name]), None)
    error: AutopartError
    if name is not None:
        error = UsageError(
            f"{name}= differs between ranks 0 and {other}",
            why=f"it is {every[0][name]} and {every[other][name]}; rank 0 plans for all",
            fix="pass the same options on every rank",
        )
    else:
        error = PlanError(
            f"ranks 0 and {other} hold different models or batches",
            why="their captured programs differ",
            fix="build the same model, with the same flags, and pass the same sample on every rank",
        )
    raise world.known(error)


def _told(failure: BaseException) -> _Told:
    return failure if isinstance(failure, AutopartError) else (type(failure).__name__, first_line(failure))


def _rebuilt(told: _Told, rank: int, doing: str, *, named: bool = True) -> AutopartError:
    """Return the failure of a rank as another rank raises it.  named: whether an AutopartError names the rank."""
    if not isinstance(told, AutopartError):
        return WorkerError(
            f"rank {rank} failed while {doing}: {told[0]}",
            why=told[1],
            fix=f"see the traceback of rank {rank}; this error only follows from it",
        )
    where = ", ".join(part for part in (f"rank {rank}" if named else "", told.where) if part)
    return type(told)(told.what, where=where, why=told.why, fix=told.fix)
