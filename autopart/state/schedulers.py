"""The state of learning rate schedulers.  One numbers the parameter groups of its optimizer, so what it keeps for each
follows the parameters of the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autopart.files.checkpoints.document import Document, SchedulerState
from autopart.files.checkpoints.values import decoded, encoded
from autopart.ir.errors import CheckpointError
from autopart.state.companions import refusal
from autopart.state.optimizers import Optimizers

_STATE = "the state of the scheduler"
_INNER = "_schedulers"
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""What torch's schedulers keep for each parameter group."""


class HasState(Protocol):
    """A learning rate scheduler, or another object with torch's two methods."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state."""


GivenScheduler = HasState | Sequence[HasState] | None
"""What a call of a user may be given: a scheduler, a list of them, or none."""


def scheduler_state(
    schedulers: Sequence[HasState], optimizers: Optimizers
) -> dict[str, Any] | tuple[SchedulerState, ...] | None:
    """Return the state of schedulers as a checkpoint keeps it (`Document.scheduler`), None without one."""
    states: list[dict[str, Any]] = [encoded(dict(each.state_dict()), _STATE) for each in schedulers]
    if len(states) == 1 and len(optimizers) < 2:
        return states[0]
    driven = [_driven(each, optimizers) for each in schedulers]
    return tuple(SchedulerState(tuple(own), state) for own, state in zip(driven, states, strict=True)) or None


def saved_schedulers(
    document: Document, schedulers: Sequence[HasState], optimizers: Optimizers, sources: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return the saved state for each scheduler, with what it keeps for each group in the order of the present ones.
    Local; changes nothing.

    sources: the saved group of each group of the optimizers (`matched`), () without optimizers: then one scheduler may
    have one group.  Raises CheckpointError for a scheduler that no state is for."""
    kept = document.scheduler
    every = list(range(len(document.optimizer.groups) if sources and document.optimizer is not None else 1))
    several = () if kept is None or isinstance(kept, dict) or not sources else kept
    entries = [(every, kept)] if isinstance(kept, dict) else [(each.groups or every, each.state) for each in several]
    left = [(theirs, decoded(state, _STATE)) for theirs, state in entries]
    if wrong := [state for _, state in left if not isinstance(state, dict)]:
        raise refusal(_STATE, wrong[0], "it has to be a table of values by name")
    result = []
    for each in schedulers:
        own = [sources[number] for number in _driven(each, optimizers) or range(len(sources))] or [0]
        for theirs, state in left:
            places = [theirs.index(n) if n is not None and n in theirs else None for n in own]
            found = _placed(each, state, each.state_dict(), places, len(theirs))
            if found is not None:
                break
        else:
            raise CheckpointError(
                f"the checkpoint holds no state for the {type(each).__name__} and its parameter groups",
                why="none that was saved has what it keeps, and drove these parameters; one that is not of torch needs "
                "all groups in the same order, and without optimizer= there may be one group",
                fix="make groups and schedulers as in the run that was saved; or load without scheduler=, and make the "
                "scheduler for the groups as they are now",
            )
        left.remove((theirs, state))
        result.append(found)
    return result


def _driven(scheduler: HasState, optimizers: Optimizers) -> list[int]:
    """Return the numbers of the parameter groups that a scheduler drives, counted over all optimizers; [] if that is
    not known."""
    first = 0
    for optimizer in optimizers:
        if optimizer is getattr(scheduler, "optimizer", None):
            return list(range(first, first + len(optimizer.param_groups)))
        first += len(optimizer.param_groups)
    return []


def _placed(
    scheduler: Any, state: Mapping[str, Any], present: Mapping[str, Any], places: Sequence[int | None], count: int
) -> dict[str, Any] | None:
    """Return a saved state with what it keeps for each of `count` groups where the group is now, None if it does not
    fit.  present: the state that the scheduler has.  places: where each of its groups was saved."""
    inner, saved, now = getattr(scheduler, _INNER, ()), state.get(_INNER, ()), present.get(_INNER, ())
    kept = [key for key in _OF_GROUPS if isinstance(state.get(key), list) and isinstance(present.get(key), list)]
    missing = {key for key in present if not key.startswith("_") or key == _INNER} - state.keys()
    movable = list(places) == list(range(count)) or type(scheduler).__module__.startswith("torch.optim.")
    if missing or not movable or len(saved) != len(inner) or any(len(state[key]) != count for key in kept):
        return None
    known = [place for place in places if place is not None]
    parts = [_placed(*each, places, count) for each in zip(inner, saved, now, strict=True)]
    if len(known) < len(places) or None in parts:
        return None
    return {
        **state,
        **{key: [state[key][place] for place in known] for key in kept},
        **({_INNER: parts} if inner else {}),
    }
