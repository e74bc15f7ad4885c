"""Which sessions of this process train one model: they may, as long as each tensor lies on the same ranks for all.

Otherwise one of them would go on with values that another has changed elsewhere.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from autopart.ir.errors import UsageError
from autopart.session.placement import Placement

if TYPE_CHECKING:
    from autopart.session.session import Session

_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def enter(session: Session, placement: Placement) -> None:
    """This session trains its model from now on, with its tensors placed so.  O(parameters of all open sessions).

    Raises UsageError where an open one places them otherwise, or has masters.
    """
    mine = _trained(session)
    for other in _OPEN - {session}:
        if mine.isdisjoint(_trained(other)):
            continue
        there = other.context.placement
        alike = (there.holders, there.keepers) == (placement.holders, placement.keepers)
        if not alike or session.has_masters or other.has_masters:
            raise UsageError(
                "the model is trained by another open pipe, which has its parameters on other ranks",
                why="each would go on with values that the other has changed elsewhere",
                fix="close() that pipe first, or give it the new plan by adopt()",
            )
    _OPEN.add(session)


def _trained(session: Session) -> set[int]:
    """The identities of its parameters."""
    return {id(parameter) for _, parameter in session.captures.trained.named_parameters()}


def leave(session: Session) -> None:
    """It trains it no more."""
    _OPEN.discard(session)
